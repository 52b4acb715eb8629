"""EPIC's LegoLink (arXiv 2410.15332): the first tokens of every chunk are computed again.

Hu et al.: EPIC, Efficient Position-Independent Caching for Serving Large Language Models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from samkv_integrations.methods.base import (
    Method,
    Recompute,
    Selection,
    SelectionInputs,
    check_count,
    check_ratio,
)
from samkv_integrations.methods.parts import SelectAll, token_budget
from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class EpicRecompute(Recompute):
    """The first tokens of each chunk, at every layer (section 4.2, LegoLink).

    A chunk that was prefilled alone has an attention sink of its own at its beginning. Computed
    again, its first tokens see the chunks before them and stop being one.

    first: so many tokens of each chunk (the paper shows 1 to 64, mostly 16).
    last: so many of its last tokens as well (how SamKV and A3 describe it).
    ratio: instead of first and last, this share of each chunk's tokens, from its beginning.

    Deviations: the original leaves the first chunk alone, this one every chunk whose cache is
    exact, which is the first chunk right after the prefix. The original keeps a BOS token in front
    of every chunk; here chunks were prefilled after the engine's prefix, whose tokens are not kept.
    """

    first: int = 16
    last: int = 0
    ratio: float | None = None

    def __post_init__(self) -> None:
        check_count("first", self.first)
        check_count("last", self.last)
        if self.ratio is not None:
            check_ratio("ratio", self.ratio)

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        if self.ratio is not None:
            return self.ratio
        return min(1.0, (self.first + self.last) * n_chunks / max(1, n_context))

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        chunk, offset = layout.chunk_of_token, layout.offset_in_chunk
        length = layout.chunk_lengths[chunk]
        if self.ratio is None:
            wanted = (offset < self.first) | (offset >= length - self.last)
        else:
            wanted = offset < token_budget(self.ratio, length)
        return selection.tokens(layout) & wanted & ~layout.exact[chunk]


def epic() -> Method:
    """LegoLink-16, the setting that the paper shows most."""
    return Method(
        name="epic",
        paper="arXiv 2410.15332",
        summary="everything kept; the first 16 tokens of each chunk recomputed",
        select=SelectAll(),
        recompute=EpicRecompute(),
    )


def auto() -> Method:
    """The default: `epic`, or full prefill where that is not slower.

    The reason is measured: docs/results/right_answers.md.
    """
    return replace(
        epic(), name="auto", else_way="epic", whole_if_faster=True,
        summary="epic, or full prefill where that is faster",
    )  # fmt: skip

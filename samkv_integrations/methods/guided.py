"""All entries used, each chunk's first tokens and the question's hits computed again: the default.

Ours. From EPIC (arXiv 2410.15332): a chunk's first tokens. From SAGE-KV (arXiv 2503.08879): the last
prompt token knows what it looks for. From A3: recompute what the question attends to, but chunk by
chunk. docs/results/real_model.md says what each of them buys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.base import (
    Method,
    ProbedLayer,
    Recompute,
    Select,
    Selection,
    SelectionInputs,
    check_count,
)
from samkv_integrations.methods.scoring import dilate, softmax_by_chunk
from samkv_integrations.prompt.layout import Layout

AFTER = 1
"""Tokens behind a hit that are recomputed with it: the answer goes on there."""


@dataclass(frozen=True, kw_only=True)
class GuidedSelect(Select):
    """Keeps everything, and scores the context tokens by the last prompt token's attention.

    A token's score is the largest share, over heads and the upper half of the layers, of a head's
    attention to the token's own chunk. So chunks do not compete: a fact that is about "the same
    company" cannot win against other chunks before it knows which company that is.

    window: last tokens of the prompt that the probe computes, such as the question.
    sinks: first tokens of the prompt that it computes with them, for attention to rest on.
    """

    window: int = 32
    sinks: int = 4

    def __post_init__(self) -> None:
        check_count("window", self.window, at_least=1)
        check_count("sinks", self.sinks)

    @property
    def probes(self) -> bool:
        return True

    def probe_tokens(self, layout: Layout) -> Tensor:
        position = torch.arange(layout.n_tokens)
        near = (position < self.sinks) | (position >= layout.n_tokens - self.window)
        return layout.uncached & near

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor | None:
        """(Tctx,) of a layer in the upper half."""
        if probed.layer < probed.n_layers // 2:
            return None
        return softmax_by_chunk(probed.last_logits(layout.n_context), layout).amax(0)

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        assert scores is not None
        return Selection.of_all(inputs.n_layers, layout, token_scores=scores.amax(0))


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute(Recompute):
    """Recomputes each chunk's first tokens, and those of the highest scores with the words before.

    Counts and no shares of the context: what a chunk's beginning and a hit need does not grow with
    the chunk.

    first: first tokens of each chunk: they were cached as if other documents stood before them.
    hits: hits, for each chunk on average.
    before: tokens before a hit that are recomputed with it: they say whom it is about.
    small_context: contexts of at most this many tokens are computed whole, which takes no longer.
    """

    first: int = 8
    hits: float = 1.0
    before: int = 8
    small_context: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.hits < math.inf:
            raise InvalidOption(f"hits={self.hits}; it must be above 0 (epic has no hits)")
        for name in ("first", "before", "small_context"):
            check_count(name, getattr(self, name))

    @property
    def whole_tokens(self) -> int:
        return self.small_context

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        of_a_chunk = self.first + self.hits * (self.before + 1 + AFTER)
        return min(1.0, of_a_chunk * n_chunks / max(1, n_context))

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        assert selection.token_scores is not None
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        begins = layout.offset_in_chunk < self.first
        scores = selection.token_scores.cpu()  # waits for the device
        scores = scores.masked_fill(given | begins, -math.inf)
        n_hits = min(round(self.hits * layout.n_chunks), int((~scores.isneginf()).sum()))
        hits = torch.zeros_like(scores)
        hits[scores.topk(n_hits).indices] = 1
        near = dilate(hits, layout, before=self.before, after=AFTER) > 0
        return ((begins | near) & ~given).repeat(inputs.n_layers, 1)


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/decisions.md)."""
    return Method(
        name="samkv-guided", paper="ours, after arXiv 2508.11661",
        summary="all used; each chunk's first 8 and most attended tokens recomputed",
        select=GuidedSelect(), recompute=GuidedRecompute(),
    )  # fmt: skip


def auto() -> Method:
    """`samkv_guided`, or full prefill where that is not slower."""
    return replace(
        samkv_guided(), name="auto", else_way="samkv-guided", whole_if_faster=True,
        summary="samkv-guided, or full prefill where that is faster",
    )  # fmt: skip

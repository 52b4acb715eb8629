"""EPIC's LegoLink (arXiv 2410.15332): recomputes the first tokens of every chunk.

Hu et al.: EPIC, Efficient Position-Independent Caching for Serving Large Language Models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from samkv_integrations.methods.base import Method, Recompute, check_count

if TYPE_CHECKING:
    from samkv_integrations.prompt.layout import Layout, Mask


@dataclass(frozen=True, kw_only=True)
class EpicRecompute(Recompute):
    """The first tokens of each chunk, at every layer (section 4.2, LegoLink).

    A chunk that was computed alone has its own attention sink at its beginning. Recomputed, its
    first tokens attend to the chunks before them and stop being a sink.

    first: first tokens of each chunk to recompute (the paper shows 1 to 64, mostly 16).

    Deviations: the original never recomputes the first chunk; here no chunk with an exact cache is
    recomputed, such as the first one right behind the prefix. The original keeps a BOS token before
    every chunk; here chunks are computed behind the engine's prefix, whose entries are dropped.
    """

    first: int = 16

    def __post_init__(self) -> None:
        check_count("first", self.first)

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        return min(1.0, self.first * n_chunks / max(1, n_context))

    def choose(self, layout: Layout) -> Mask:
        return (layout.offset_in_chunk < self.first) & ~layout.exact[layout.chunk_of_token]


EPIC = Method(
    name="epic",
    paper="arXiv 2410.15332",
    summary="everything kept; the first 16 tokens of each chunk recomputed",
    recompute=EpicRecompute(),
)

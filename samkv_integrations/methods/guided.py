"""The default: recomputes first tokens of chunks, and what shares rare tokens with the question.

Ours. From EPIC (arXiv 2410.15332): the first tokens of a chunk are recomputed. What the question
names is found as BM25 would, without a pass of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.methods.base import (
    Method,
    Recompute,
    SelectionInputs,
    check_count,
)
from samkv_integrations.prompt.layout import Layout

SEGMENT = 32  # tokens of a segment of a chunk
MOST_MATCHED = 6  # at most a sixth of the context, so that most of a short one is reused


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute(Recompute):
    """Recomputes first tokens of chunks, and segments that match the question.

    first: first tokens of each chunk; their cached entries see the wrong preceding text.
    matched: limit of further tokens, in the whole prompt, in segments that share tokens with the
        question; at most a sixth of the context.
    matched_again: the same for each later question of a conversation, whose chunks are in memory.
    """

    first: int = 8
    matched: int = 96
    matched_again: int = 32

    def __post_init__(self) -> None:
        check_count("first", self.first)
        check_count("matched", self.matched)
        check_count("matched_again", self.matched_again)

    def _most_matched(self, n_context: int) -> int:
        return min(self.matched, n_context // MOST_MATCHED)

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        most = self.first * n_chunks + self._most_matched(n_context)
        return min(1.0, most / max(1, n_context))

    def choose(self, kept: Tensor, inputs: SelectionInputs, layout: Layout) -> Tensor:
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        recomputed = layout.offset_in_chunk < self.first
        recomputed |= matching_segments(
            layout, SEGMENT, self._most_matched(layout.n_context), given | recomputed
        )
        return (recomputed & ~given).repeat(inputs.n_layers, 1)

    def choose_again(self, layout: Layout, given: Tensor) -> Tensor:
        most = min(self.matched_again, layout.n_context // MOST_MATCHED)
        return matching_segments(layout, SEGMENT, most, given) & ~given


def matching_segments(layout: Layout, size: int, most: int, given: Tensor) -> Tensor:
    """(Tctx,) bool: segments of chunks that share rare tokens with the question. Ours, after BM25.

    Segments have ``size`` tokens. The best ones are taken while they have at most ``most`` tokens
    together, without those in ``given`` ((Tctx,) bool). The score of a segment is the sum of
    log((n + 1) / (m + 0.5)) over the question's tokens in it, where n counts all segments and m
    those with the token, plus half of that sum over the question's tokens in its chunk.
    """
    ids, chunk = layout.token_ids[layout.context_positions], layout.chunk_of_token
    asked: Tensor = torch.unique(layout.token_ids[layout.question])
    asked = asked[torch.isin(asked, ids)]
    if not len(asked):
        return torch.zeros_like(given)
    place = torch.searchsorted(asked, ids).clamp(max=len(asked) - 1)
    is_asked = asked[place] == ids
    most_of_chunk = int(layout.chunk_lengths.max()) // size + 1
    number = chunk * most_of_chunk + layout.offset_in_chunk // size
    numbers, segment = torch.unique(number, return_inverse=True)  # by columns it is 40 times slower
    of_chunk = numbers // most_of_chunk
    length = torch.zeros(len(of_chunk), dtype=torch.float32).index_add(0, segment, (~given).float())
    in_segment = torch.zeros(len(length), len(asked), dtype=torch.float32)
    in_segment[segment[is_asked], place[is_asked]] = 1.0
    in_chunk = torch.zeros(layout.n_chunks, len(asked), dtype=torch.float32)
    in_chunk[chunk[is_asked], place[is_asked]] = 1.0
    rarity = ((len(length) + 1) / (in_segment.sum(0) + 0.5)).log()
    own = in_segment @ rarity
    score = (own + (in_chunk @ rarity)[of_chunk] / 2).masked_fill(own == 0, -math.inf)
    order = score.argsort(descending=True, stable=True)
    fits = (length[order].cumsum(0) <= most) & (own[order] > 0)
    chosen = torch.zeros(len(length), dtype=torch.bool)
    chosen[order[fits]] = True
    return chosen[segment]


SAMKV_GUIDED = Method(
    name="samkv-guided", paper="ours, after arXiv 2410.15332",
    summary="everything kept; recomputed: the first 8 tokens of each chunk, and segments that "
    "share rare tokens with the question",
    recompute=GuidedRecompute(),
)  # fmt: skip
AUTO = replace(
    SAMKV_GUIDED, name="auto", else_way="samkv-guided", whole_if_faster=True,
    summary="samkv-guided, or full prefill where that is faster",
)  # fmt: skip
"""The default. The reason is measured: docs/results/right_answers.md."""

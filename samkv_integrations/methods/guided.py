"""The default: recomputes first tokens of chunks, and segments like the question.

Ours. From EPIC (arXiv 2410.15332): the first tokens of a chunk are recomputed. Segments that share
rare tokens with the question are found as by BM25, without a pass of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from samkv_integrations.methods.base import Method, Recompute, check_count

if TYPE_CHECKING:
    from samkv_integrations.prompt.layout import Layout, Mask

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

    @property
    def way(self) -> str:
        return "samkv-guided" if self.matched else "epic"  # which takes no segments

    def _most_matched(self, n_context: int) -> int:
        return min(self.matched, n_context // MOST_MATCHED)

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        most = self.first * n_chunks + self._most_matched(n_context)
        return min(1.0, most / max(1, n_context))

    def choose(self, layout: Layout) -> Mask:
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        first = layout.offset_in_chunk < self.first
        most = self._most_matched(layout.n_context)
        return (first | matching_segments(layout, SEGMENT, most, given | first)) & ~given

    def choose_again(self, layout: Layout, given: Mask) -> Mask:
        most = min(self.matched_again, layout.n_context // MOST_MATCHED)
        return matching_segments(layout, SEGMENT, most, given) & ~given


LARGE = 10**9
"""Parameters from which a model needs less recomputed. Measured at .5 and 1.5 billion."""


@dataclass(frozen=True, kw_only=True)
class AutoRecompute(Recompute):
    """`GuidedRecompute` with the numbers of tokens that suit the model's size.

    Models of `LARGE` parameters or more: the first 4 tokens of each chunk, and segments for later
    questions of a conversation only. All others: the defaults of `GuidedRecompute`. A number that
    is not None counts for every model.
    """

    first: int | None = None
    matched: int | None = None
    matched_again: int | None = None

    def __post_init__(self) -> None:
        self.for_model(0)  # checks the numbers

    def for_model(self, n_parameters: int) -> GuidedRecompute:
        small, large = GuidedRecompute(), GuidedRecompute(first=4, matched=0)
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(large if n_parameters >= LARGE else small, **given)

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        return self.for_model(0).most_ratio(n_context, n_chunks)

    def choose(self, layout: Layout) -> Mask:
        return self.for_model(0).choose(layout)

    def choose_again(self, layout: Layout, given: Mask) -> Mask:
        return self.for_model(0).choose_again(layout, given)


def matching_segments(layout: Layout, size: int, most: int, given: Mask) -> Mask:
    """(Tctx,) bool: segments of chunks that share rare tokens with the question. Ours, after BM25.

    Segments have ``size`` tokens. The best ones are taken while they have at most ``most`` tokens
    together; tokens in ``given`` ((Tctx,) bool) do not count. The score of a segment is the sum of
    log((n + 1) / (m + 0.5)) over the question's tokens in it, where n counts all segments and m
    those with the token, plus half of that sum over the question's tokens in its chunk. Of segments
    with equal scores the earlier one is taken.
    """
    ids, chunk = layout.token_ids[layout.context_positions], layout.chunk_of_token
    asked = np.intersect1d(layout.token_ids[layout.question], ids)
    if not len(asked):
        return np.zeros_like(given)
    most_of_chunk = int(layout.chunk_lengths.max()) // size + 1
    number = chunk * most_of_chunk + layout.offset_in_chunk // size
    numbers, segment = np.unique(number, return_inverse=True)
    n_segments, of_chunk = len(numbers), numbers // most_of_chunk
    is_asked = np.isin(ids, asked)
    place = np.searchsorted(asked, ids[is_asked])
    # each token of the question once for every segment, and for every chunk, that contains it
    found, token = np.divmod(np.unique(segment[is_asked] * len(asked) + place), len(asked))
    in_chunk, token_there = np.divmod(np.unique(chunk[is_asked] * len(asked) + place), len(asked))
    rarity = np.log((n_segments + 1) / (np.bincount(token, minlength=len(asked)) + 0.5))
    own = np.bincount(found, rarity[token], n_segments)
    of_chunks = np.bincount(in_chunk, rarity[token_there], layout.n_chunks)
    score = np.where(own == 0, -np.inf, own + of_chunks[of_chunk] / 2)
    score = score.round(9)  # equal sums are equal, in whichever order their terms were added
    order = np.argsort(-score, kind="stable")
    n_new = np.bincount(segment[~given], minlength=n_segments)
    fits = (np.cumsum(n_new[order]) <= most) & (own[order] > 0)
    chosen = np.zeros(n_segments, np.bool_)
    chosen[order[fits]] = True
    return chosen[segment]


SAMKV_GUIDED = Method(
    name="samkv-guided", paper="ours, after arXiv 2410.15332",
    summary="everything kept; recomputed: the first 8 tokens of each chunk, and segments that "
    "share rare tokens with the question",
    recompute=GuidedRecompute(),
)  # fmt: skip
AUTO = replace(
    SAMKV_GUIDED, name="auto", else_way="samkv-guided", recompute=AutoRecompute(),
    summary="samkv-guided, or full prefill where that is faster; with models of a billion "
    "parameters or more only the first 4 tokens of each chunk are recomputed at first",
)  # fmt: skip
"""The default. The reason is measured: docs/results/right_answers.md."""

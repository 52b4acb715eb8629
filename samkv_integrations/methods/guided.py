"""The default method: the first tokens of each chunk, and hits of the question in long chunks.

Ours. From EPIC (arXiv 2410.15332): the first tokens of a chunk are recomputed. From SAGE-KV
(arXiv 2503.08879): the last prompt token knows what it looks for. From A3: recompute what the
question attends to, but chunk by chunk. The settings: docs/results/real_model.md.
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
    check_ratio,
)  # fmt: skip
from samkv_integrations.methods.scoring import dilate, softmax_by_chunk
from samkv_integrations.prompt.layout import Layout

SINKS = 4  # first tokens of the prompt that the probe computes, for attention to rest on
BEFORE = 8  # tokens before a hit that are recomputed with it: they say whom it is about
AFTER = 1  # tokens behind a hit that are recomputed with it: the answer goes on there


@dataclass(frozen=True, kw_only=True)
class GuidedSelect(Select):
    """Keeps everything, and scores the tokens of long chunks by the last prompt token's attention.

    A token's score is the largest share, over heads and the upper half of the layers, of a head's
    attention to the token's own chunk. So chunks do not compete: a fact that is about "the same
    company" cannot win against other chunks before it knows which company that is.

    window: last tokens of the prompt that the probe computes, such as the question.
    long: mean tokens of a chunk from which there is a probe: below, first tokens do more.
    """

    window: int = 64
    long: int = 192

    def __post_init__(self) -> None:
        check_count("window", self.window, at_least=1)
        check_count("long", self.long)

    @property
    def probes(self) -> bool:
        return True

    def probe_tokens(self, layout: Layout) -> Tensor:
        """(T,) bool; none where chunks are short."""
        if layout.n_context < self.long * layout.n_chunks or not layout.n_chunks:
            return torch.zeros_like(layout.uncached)
        position = torch.arange(layout.n_tokens)
        return layout.uncached & ((position < SINKS) | (position >= layout.n_tokens - self.window))

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor | None:
        """(Tctx,) of a layer in the upper half."""
        if probed.layer < probed.n_layers // 2:
            return None
        return self.shares(probed.last_logits(layout.n_context), layout).amax(0)

    def shares(self, logits: Tensor, layout: Layout) -> Tensor:  # (H, Tctx) both
        return softmax_by_chunk(logits, layout)

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        best = None if scores is None else scores.amax(0)
        return Selection.of_all(inputs.n_layers, layout, token_scores=best)


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute(Recompute):
    """Recomputes each chunk's first tokens and, if there are scores, the hits with words around.

    first: first tokens of each chunk: they were cached as if other documents stood before them.
    share: of a long chunk, this share of its tokens, if that is more than `first`.
    hits: tokens of the highest scores, a chunk on average; 0 for none.
    small_context: contexts of at most this many tokens are computed whole, which takes no longer.
    """

    first: int = 24
    share: float = 0.0625
    hits: float = 1.0
    small_context: int = 128

    def __post_init__(self) -> None:
        check_ratio("share", self.share)
        if not 0 <= self.hits < math.inf:
            raise InvalidOption(f"hits={self.hits}; it must be 0 or more")
        for name in ("first", "small_context"):
            check_count(name, getattr(self, name))

    @property
    def whole_tokens(self) -> int:
        return self.small_context

    def most_ratio(self, n_context: int, n_chunks: int, *, scored: bool) -> float:
        length = n_context / max(1, n_chunks)
        around_hits = self.hits * (BEFORE + 1 + AFTER) if scored else 0
        return min(1.0, (max(self.first, self.share * length) + around_hits) / max(1, length))

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        n_first = (self.share * layout.chunk_lengths).long().clamp(min=self.first)
        recomputed = layout.offset_in_chunk < n_first[layout.chunk_of_token]
        if selection.token_scores is not None:
            scores = selection.token_scores.cpu()  # waits for the device
            scores = scores.masked_fill(given | recomputed, -math.inf)
            n_hits = min(round(self.hits * layout.n_chunks), int(scores.isfinite().sum()))
            hits = torch.zeros(layout.n_context)
            hits[scores.argsort(descending=True, stable=True)[:n_hits]] = 1.0
            recomputed |= dilate(hits, layout, before=BEFORE, after=AFTER) > 0
        return (recomputed & ~given).repeat(inputs.n_layers, 1)


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/results/real_model.md)."""
    return Method(
        name="samkv-guided", paper="ours, after arXiv 2410.15332",
        summary="everything kept; first tokens of chunks, and hits in long ones, recomputed",
        select=GuidedSelect(), recompute=GuidedRecompute(),
    )  # fmt: skip


def auto() -> Method:
    """`samkv_guided`, or full prefill where that is not slower."""
    return replace(
        samkv_guided(), name="auto", else_way="samkv-guided", whole_if_faster=True,
        summary="samkv-guided, or full prefill where that is faster",
    )  # fmt: skip

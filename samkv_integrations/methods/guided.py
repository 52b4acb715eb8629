"""The default method: recomputes first tokens of chunks, and what the question asks about.

Ours. From EPIC (arXiv 2410.15332): the first tokens of a chunk are recomputed. From SAGE-KV
(arXiv 2503.08879): the last prompt token knows what it looks for. From A3: recompute what the
question attends to, but chunk by chunk. What shares rare tokens with the question is found as BM25
would, without a pass of the model. The settings: docs/results/real_model.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.base import (
    MOST_TOKENS,
    Method,
    ProbedLayer,
    Recompute,
    Select,
    Selection,
    SelectionInputs,
    check_count,
)  # fmt: skip
from samkv_integrations.methods.parts import dilate, matching_segments, softmax_by_chunk
from samkv_integrations.prompt.layout import Layout

SINKS = 4  # first tokens of the prompt that the probe computes, for attention to rest on
BEFORE = 8  # tokens before a hit that are recomputed with it: they say whom it is about
AFTER = 1  # tokens behind a hit that are recomputed with it: the answer goes on there
SEGMENT = 32  # tokens of a segment of a chunk
MOST_MATCHED = 6  # a sixth of the context at most: else little of a short one would be reused


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
    """Recomputes first tokens of chunks, segments that match the question, and hits.

    first: first tokens of each chunk: they were cached as if other documents stood before them.
    matched: most tokens, in the whole prompt, of segments that share tokens with the question,
        besides first tokens; a sixth of the context at most.
    hits: tokens of the highest scores, a chunk on average, with words around; 0 for none.
    small_context: contexts of at most this many tokens are computed whole, which takes no longer.
    """

    first: int = 16
    matched: int = 96
    hits: float = 1.0
    small_context: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.hits, int | float) or not 0 <= self.hits <= MOST_TOKENS:
            raise InvalidOption(f"hits={self.hits!r}; it must be 0 or more, at most {MOST_TOKENS}")
        for name in ("first", "matched", "small_context"):
            check_count(name, getattr(self, name))

    @property
    def whole_tokens(self) -> int:
        return self.small_context

    def _most_matched(self, n_context: int) -> int:
        return min(self.matched, n_context // MOST_MATCHED)

    def most_ratio(self, n_context: int, n_chunks: int, *, scored: bool) -> float:
        n_hits = round(self.hits * n_chunks) if scored else 0
        most = self.first * n_chunks + n_hits * (BEFORE + 1 + AFTER)
        most += self._most_matched(n_context)
        return min(1.0, most / max(1, n_context))

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        recomputed = layout.offset_in_chunk < self.first
        recomputed |= matching_segments(
            layout, SEGMENT, self._most_matched(layout.n_context), given | recomputed
        )
        if selection.token_scores is not None:
            scores = selection.token_scores.cpu()  # waits for the device
            scores = scores.masked_fill(given | recomputed, -math.inf)
            n_hits = min(round(self.hits * layout.n_chunks), int(scores.isfinite().sum()))
            hits = torch.zeros(layout.n_context, dtype=torch.float32)
            hits[scores.argsort(descending=True, stable=True)[:n_hits]] = 1.0
            recomputed |= dilate(hits, layout, before=BEFORE, after=AFTER) > 0
        return (recomputed & ~given).repeat(inputs.n_layers, 1)


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/results/real_model.md)."""
    return Method(
        name="samkv-guided", paper="ours, after arXiv 2410.15332",
        summary="everything kept; recomputed: first tokens, what the question names, hits",
        select=GuidedSelect(), recompute=GuidedRecompute(),
    )  # fmt: skip


def auto() -> Method:
    """`samkv_guided`, or full prefill where that is not slower."""
    return replace(
        samkv_guided(), name="auto", else_way="samkv-guided", whole_if_faster=True,
        summary="samkv-guided, or full prefill where that is faster",
    )  # fmt: skip

"""Everything read in few bits, a few tokens recomputed, few attended to: the engine's default.

Ours. From SamKV (arXiv 2508.11661): sets of recomputed tokens that shrink with depth. From SAGE-KV
(arXiv 2503.08879): the last prompt token knows what it looks for. From A3: recompute what the
question attends to, but chunk by chunk. From Quest (arXiv 2406.10774): each step chooses anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction.quest import Quest
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
from samkv_integrations.methods.scoring import best_within, dilate, softmax_by_chunk
from samkv_integrations.prompt.layout import Layout

TOKENS_A_FIRST = 64  # of a chunk, for each first token: short chunks need the room for their hits
AFTER = 1  # tokens behind a hit that are recomputed with it: the answer goes on there


@dataclass(frozen=True, kw_only=True)
class GuidedSelect(Select):
    """Keeps everything, and scores the context tokens by the last prompt token's attention.

    A token's score is the largest share, over heads and the upper half of the layers, of a head's
    attention to the token's own chunk. So chunks do not compete: a fact that is about "the same
    company" cannot win against other chunks before it knows which company that is.

    window: last tokens of the prompt that the probe computes, such as the question.
    sinks: first tokens of the prompt that it computes with them, for attention to rest on.
    """

    window: int = 64
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
        return self.shares(probed.last_logits(layout.n_context), layout).amax(0)

    def shares(self, logits: Tensor, layout: Layout) -> Tensor:  # (H, Tctx) both
        return softmax_by_chunk(logits, layout)

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        assert scores is not None
        return Selection.of_all(inputs.n_layers, layout, token_scores=scores.amax(0))


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute(Recompute):
    """Recomputes each chunk's first tokens, and those of the highest scores with the words around.

    ratio: most recomputed tokens as a share of the context, mean over layers; 0 for none.
    hits: most hits a chunk, mean over the chunks: what a hit needs around it does not grow with its
        document. None for no such limit.
    before: tokens before a hit that are recomputed with it: they say whom it is about.
    lead_layers: share of the layers, from the first, in which those before a hit are recomputed.
    first: first tokens of each chunk that are recomputed, at most one for every 64 of its tokens:
        they were cached as if nothing stood before them (EPIC, arXiv 2410.15332).
    small_context: contexts of at most this many tokens are computed whole, which takes no longer.
    """

    ratio: float = 0.1
    hits: float | None = 2.5
    before: int = 8
    lead_layers: float = 0.75
    first: int = 4
    small_context: int = 128

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_ratio("lead_layers", self.lead_layers)
        if self.hits is not None and not self.hits > 0:
            raise InvalidOption(f"hits={self.hits}; it must be above 0, or None for no limit")
        for name in ("before", "first", "small_context"):
            check_count(name, getattr(self, name))

    @property
    def whole_tokens(self) -> int:
        return self.small_context if self.ratio else 0

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        if self.hits is None:
            return self.ratio
        n_first = min(self.first, n_context // (TOKENS_A_FIRST * max(1, n_chunks)))
        of_a_chunk = n_first + self.hits * (self.before * self.lead_layers + 1 + AFTER)
        return min(self.ratio, of_a_chunk * n_chunks / max(1, n_context))

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        assert selection.token_scores is not None
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        hits = selection.token_scores.cpu().masked_fill(given, -math.inf)  # waits for the device
        n_first = (torch.bincount(layout.chunk_of_token) // TOKENS_A_FIRST).clamp(max=self.first)
        begins = layout.offset_in_chunk < n_first[layout.chunk_of_token]
        answering, wanted = (
            dilate(hits, layout, before=before, after=AFTER).masked_fill(begins, math.inf)
            for before in (0, self.before)
        )
        wanted = wanted.masked_fill(given, -math.inf)  # exact already, or computed anyway
        leads_up, lower = wanted > answering, math.ceil(self.lead_layers * inputs.n_layers)
        cost = torch.where(leads_up, lower / inputs.n_layers, 1.0)
        budget = self.most_ratio(layout.n_context, layout.n_chunks) * layout.n_context
        recomputed = best_within(wanted, cost, budget).repeat(inputs.n_layers, 1)
        recomputed[lower:] &= ~leads_up
        return recomputed


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/decisions.md)."""
    return Method(
        name="samkv-guided", paper="ours, after arXiv 2508.11661",
        summary="all read in few bits; each chunk's first and most attended tokens recomputed",
        select=GuidedSelect(), recompute=GuidedRecompute(), eviction=Quest(budget_ratio=0.1),
    )  # fmt: skip


def auto() -> Method:
    """`samkv_guided`, or full prefill where that is not slower."""
    return replace(
        samkv_guided(), name="auto", else_way="samkv-guided", whole_if_faster=True,
        summary="samkv-guided, or full prefill where that is faster",
    )  # fmt: skip

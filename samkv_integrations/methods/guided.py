"""Everything read in few bits, a few tokens recomputed, few attended to: the engine's default.

Ours. From SamKV (arXiv 2508.11661): partial recomputation in sets of tokens that shrink with depth.
From SAGE-KV (arXiv 2503.08879): the last prompt token knows what it is looking for. From A3:
recompute what the question attends to, but chunk by chunk. From Quest (arXiv 2406.10774): every
step of the answer chooses anew what it attends to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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
    check_ratio,
    overwrite,
)
from samkv_integrations.methods.scoring import dilate, softmax_by_chunk
from samkv_integrations.prompt.layout import Layout

TOKENS_A_FIRST = 64
"""Tokens of a chunk for each of its first ones that is recomputed: in short chunks they would take
the room of the hits (docs/decisions.md)."""


@dataclass(frozen=True, kw_only=True)
class GuidedSelect(Select):
    """Keeps everything, and scores the context tokens by the last prompt token's attention.

    The probe computes the end of the prompt, which is the question, over the whole context. A
    token's score is the largest share, over heads and the upper half of the layers, of a head's
    attention to the token's own chunk. So chunks do not compete: a fact that is about "the same
    company" cannot win against other chunks before it knows which company that is.

    window: last tokens of the prompt that the probe computes; other uncached text waits for the
        answer's pass.
    sinks: first tokens of the prompt that it computes with them, for attention to rest on.
    compete: let chunks compete all the same, by the attention to the whole context (A3's choice,
        but in the upper layers).
    """

    window: int = 64
    sinks: int = 4
    compete: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InvalidOption(f"window={self.window}; it must be at least 1")
        if self.sinks < 0:
            raise InvalidOption(f"sinks={self.sinks}; it must be 0 or more")

    @property
    def probes(self) -> bool:
        return True

    def probe_blocks(self, layout: Layout) -> Tensor:
        return torch.ones(layout.n_blocks, dtype=torch.bool)

    def probe_tokens(self, layout: Layout) -> Tensor:
        position = torch.arange(layout.n_tokens)
        near = (position < self.sinks) | (position >= layout.n_tokens - self.window)
        return layout.uncached & near

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor | None:
        """(Tctx,) of a layer in the upper half."""
        if probed.layer < probed.n_layers // 2:
            return None
        keys = probed.keys.float()  # (n, G, D)
        query = probed.queries[:, -1].float().view(keys.shape[1], -1, keys.shape[2])
        logits = torch.einsum("grd,tgd->grt", query * probed.scaling, keys).flatten(0, 1)
        # Where a prompt ends with a chunk, its last token has no stored key, and nobody wants it.
        ahead = (0, layout.n_context - len(keys))
        logits = F.pad(logits, ahead, value=torch.finfo(logits.dtype).min)
        share = logits.softmax(-1) if self.compete else softmax_by_chunk(logits, layout)
        return share.amax(0)

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        assert scores is not None
        keep = torch.ones(inputs.n_layers, layout.n_blocks, dtype=torch.bool)
        return Selection(keep=keep, token_scores=scores.amax(0))


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute(Recompute):
    """Recomputes each chunk's first tokens, and those of the highest scores with the words around.

    ratio: most recomputed tokens as a share of the context, mean over layers; 0 for none.
    hits: so many hits a chunk, on average over the chunks, with the words around each, are enough:
        what a hit needs around it does not grow with its document. None for no such limit.
    before, after: tokens around a hit that are recomputed with it: the words before it say whom it
        is about, and an answer goes on behind its beginning.
    lead_layers: share of the layers, from the first, in which those before a hit are recomputed.
    first: first tokens of each chunk that are recomputed, at most one for every 64 of its tokens:
        later ones rest their attention on them, and they were cached as if nothing stood before
        them (EPIC, arXiv 2410.15332).
    small_context: contexts of at most this many tokens are computed as a whole, which is full
        prefill: one pass over all tokens takes no longer than two over few.
    """

    ratio: float = 0.1
    hits: float | None = 2.5
    before: int = 8
    after: int = 1
    lead_layers: float = 0.75
    first: int = 4
    small_context: int = 128

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_ratio("lead_layers", self.lead_layers)
        if self.hits is not None and not self.hits > 0:
            raise InvalidOption(f"hits={self.hits}; it must be above 0, or None for no limit")
        for name in ("before", "after", "first", "small_context"):
            if (count := getattr(self, name)) < 0:
                raise InvalidOption(f"{name}={count}; it must be 0 or more")

    @property
    def whole_tokens(self) -> int:
        return self.small_context if self.ratio else 0

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        if self.hits is None:
            return self.ratio
        of_a_hit = self.before * self.lead_layers + 1 + self.after
        n_first = min(self.first, n_context // (TOKENS_A_FIRST * max(1, n_chunks)))
        of_a_chunk = n_first + self.hits * of_a_hit
        return min(self.ratio, of_a_chunk * n_chunks / max(1, n_context))

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        n_layers = inputs.n_layers
        recomputed = torch.zeros(n_layers, layout.n_context, dtype=torch.bool)
        if not self.ratio:
            return recomputed
        assert selection.token_scores is not None
        hits = selection.token_scores.cpu()  # the one time that a request waits for its device
        given = layout.exact[layout.chunk_of_token] | layout.uncached[layout.context_positions]
        hits = hits.masked_fill(given, -math.inf)
        lengths = torch.bincount(layout.chunk_of_token)
        n_first = (lengths // TOKENS_A_FIRST).clamp(max=self.first)
        begins = layout.offset_in_chunk < n_first[layout.chunk_of_token]
        answering, wanted = (
            dilate(hits, layout, before=before, after=self.after).masked_fill(begins, math.inf)
            for before in (0, self.before)
        )
        wanted = wanted.masked_fill(given, -math.inf)
        leads_up = wanted > answering
        lower = math.ceil(self.lead_layers * n_layers)
        cost = torch.where(leads_up, lower / n_layers, 1.0)
        order = wanted.argsort(descending=True, stable=True)  # many share the score of one hit
        budget = self.most_ratio(layout.n_context, layout.n_chunks) * layout.n_context
        affordable = cost[order].cumsum(0) <= budget + 1e-3
        affordable &= ~wanted[order].isneginf()
        recomputed[:] = torch.zeros(layout.n_context, dtype=torch.bool).scatter(
            0, order, affordable
        )
        recomputed[lower:] &= ~leads_up
        return recomputed


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/decisions.md)."""
    return Method(
        name="samkv-guided",
        paper="ours, after arXiv 2508.11661",
        summary="all read in few bits; each chunk's first and most attended tokens recomputed",
        select=GuidedSelect(),
        recompute=GuidedRecompute(),
        update=overwrite,
        eviction=Quest(budget_ratio=0.1),
    )


def auto() -> Method:
    """`samkv_guided`, or full prefill where that is not slower."""
    guided = samkv_guided()
    return replace(
        guided,
        name="auto",
        else_way=guided.name,
        summary="samkv-guided, or full prefill where that is faster",
        whole_if_faster=True,
    )

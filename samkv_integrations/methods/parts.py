"""Parts, scores and budgets that several methods share, and the baselines without a paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.cache.formats.quantise import unrotate
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.base import (
    Method,
    ProbedLayer,
    Recompute,
    Select,
    Selection,
    SelectionInputs,
    check_ratio,
)
from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class SelectAll(Select):
    """Keep every block at every layer."""

    keeps_all: ClassVar[bool] = True

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        return Selection(keep=torch.ones(inputs.n_layers, layout.n_blocks, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class RecomputeAll(Recompute):
    """Recompute every token: full prefill."""

    uses_caches: ClassVar[bool] = False

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return selection.tokens(layout)


@dataclass(frozen=True, kw_only=True)
class RecomputeInexact(Recompute):
    """Recompute every token whose cached entry may differ from full prefill's."""

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return selection.tokens(layout) & ~layout.exact[layout.chunk_of_token]


@dataclass(frozen=True, kw_only=True)
class RecomputeNone(Recompute):
    """Recompute nothing."""

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return torch.zeros(len(selection.keep), layout.n_context, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class RecomputeFrom(Recompute):
    """Recompute all tokens up to a check layer, and above it those that `choose_after` picks.

    ratio: share of the context for the layers above. Exact chunks are never recomputed.
    layer: the check layer, counted from 0.
    """

    ratio: float = 0.15
    layer: int = 1

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        if self.layer < 0:
            raise InvalidOption(f"layer={self.layer}; it must be 0 or more")

    @property
    def check_layer(self) -> int | None:
        return self.layer

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        recomputed = selection.tokens(layout) & ~layout.exact[layout.chunk_of_token]
        recomputed[self.layer + 1 :] = False
        return recomputed


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Mix of recomputed and cached entry (SamKV equation 4): theta * new + (1 - theta) * old.

    weight: theta; None for the cosine of new and old per token over all heads.
    """

    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_ratio("weight", self.weight)

    def __call__(self, cached: Tensor, computed: Tensor) -> Tensor:
        """Both (R, G, D); keys at the same position. Returns the dtype of ``computed``."""
        old, new = cached.float(), computed.float()
        theta: Tensor | float
        if self.weight is None:
            theta = F.cosine_similarity(new.flatten(1), old.flatten(1), dim=1)[:, None, None]
        else:
            theta = self.weight
        return (theta * new + (1 - theta) * old).to(computed.dtype)


def token_budget(ratio: float, n_tokens: Tensor) -> Tensor:
    """``ratio`` of ``n_tokens``, rounded up, with a tolerance for the error of floats."""
    return (ratio * n_tokens.double() - 1e-6).ceil().clamp(min=0).long()


def top_tokens(scores: Tensor, tokens: Tensor, ratio: float, layout: Layout) -> Tensor:
    """(Tctx,) bool, CPU: the ``tokens`` (n,) with the best scores, ``ratio`` of the context."""
    recomputed = torch.zeros(layout.n_context, dtype=torch.bool)
    count = min(len(tokens), int(token_budget(ratio, torch.tensor(layout.n_context))))
    recomputed[tokens[scores.topk(count).indices.cpu()]] = True
    return recomputed


def mean_query(probed: ProbedLayer, n_last: int) -> Tensor:
    """(H, D) float32: mean un-rotated query of the probe's ``n_last`` last tokens."""
    queries = probed.queries[:, -n_last:].transpose(0, 1).float()
    return unrotate(queries, probed.cos[-n_last:], probed.sin[-n_last:]).mean(0)


def group_heads(queries: Tensor, n_kv_heads: int) -> Tensor:
    """(..., H, D) -> (..., G, D): mean over the query heads that share a key-value head.

    Consecutive query heads share one, as in transformers' ``repeat_kv``.
    """
    *lead, heads, dim = queries.shape
    return queries.reshape(*lead, n_kv_heads, heads // n_kv_heads, dim).mean(dim=-2)


def personalise(query: Tensor, local_query: Tensor) -> Tensor:
    """A personalised query for each chunk (SamKV equation 1).

    query (L, H, D), local_query (L, C, H, D) -> (L, C, H, D): the query plus, for each chunk, the
    mean of the other chunks' local queries, each weighted with its absolute cosine to the query
    over the whole (H, D) vector. With one chunk there is no bias.
    """
    n_chunks = local_query.shape[1]
    spread = query[:, None].expand_as(local_query)
    if n_chunks == 1:
        return spread
    cosine = F.cosine_similarity(spread.flatten(2), local_query.flatten(2), dim=-1)
    weighted = cosine.abs()[..., None, None] * local_query
    return spread + (weighted.sum(1, keepdim=True) - weighted) / (n_chunks - 1)


def fill_budget(order: Tensor, layout: Layout, budget_tokens: float | Tensor) -> Tensor:
    """(L, Nb) bool: the best blocks of each layer, up to ``budget_tokens``.

    order: (L, Nb) scores; -inf is never taken. Filling ends at the first block that does not fit.
    budget_tokens: one for all layers, or (L, 1).
    """
    ranking = order.argsort(dim=1, descending=True, stable=True)
    lengths = layout.block_lengths.to(order.device)[ranking]
    lengths = lengths.masked_fill(order.gather(1, ranking).isneginf(), 0)
    whole = torch.as_tensor(budget_tokens, dtype=torch.float64).floor().long().to(order.device)
    fits = (lengths.cumsum(1) <= whole) & (lengths > 0)
    return torch.zeros_like(fits).scatter(1, ranking, fits)


def matching_segments(layout: Layout, size: int, most: int, given: Tensor) -> Tensor:
    """(Tctx,) bool: segments of chunks that share rare tokens with the question. Ours, after BM25.

    Segments have ``size`` tokens. The best ones are taken while they have at most ``most`` tokens
    together, without those in ``given`` ((Tctx,) bool). The score of a segment is the sum of
    log((n + 1) / (m + 0.5)) over the question's tokens in it, where n counts all segments and m
    those with the token, plus half of that sum over the question's tokens in its chunk.
    """
    ids, chunk = layout.token_ids[layout.context_positions], layout.chunk_of_token
    asked: Tensor = torch.unique(layout.token_ids[layout.question])
    place = torch.searchsorted(asked, ids).clamp(max=len(asked) - 1)
    is_asked = asked[place] == ids
    most_of_chunk = layout.longest_chunk // size + 1
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


def recompute() -> Method:
    """Full prefill: the whole prompt is computed, and no cache is used."""
    return Method(
        name="recompute",
        paper="-",
        summary="full prefill: every chunk computed again from its text",
        select=SelectAll(),
        recompute=RecomputeAll(),
    )


def reuse() -> Method:
    """Every cached token at its position in the prompt; nothing recomputed."""
    return Method(
        name="reuse",
        paper="-",
        summary="whole caches at their true positions, nothing recomputed",
        select=SelectAll(),
        recompute=RecomputeNone(),
    )


def reuse_local() -> Method:
    """Every cached token at the position where it was computed (the papers' Reuse)."""
    return Method(
        name="reuse-local",
        paper="Reuse in arXiv 2508.11661",
        summary="whole caches at the positions of their prefill, nothing recomputed",
        select=SelectAll(),
        recompute=RecomputeNone(),
        positions="local",
    )

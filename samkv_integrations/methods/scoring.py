"""Scores of tokens and blocks, and budgets that the best of them fill."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samkv_integrations.cache.formats.quantise import unrotate
from samkv_integrations.methods.base import ProbedLayer, Select
from samkv_integrations.prompt.layout import Layout


def top_tokens(scores: Tensor, tokens: Tensor, ratio: float, layout: Layout) -> Tensor:
    """(Tctx,) bool, CPU: the ``tokens`` (n,) with the best scores, ``ratio`` of the context."""
    recomputed = torch.zeros(layout.n_context, dtype=torch.bool)
    most = math.ceil(ratio * layout.n_context - 1e-6)  # a tolerance for the error of floats
    count = min(len(tokens), max(0, most))
    recomputed[tokens[scores.topk(count).indices.cpu()]] = True
    return recomputed


class AnchorProbe(Select):
    """Selects by the question's mean query, which a pass over the anchor tokens gives."""

    def probe_blocks(self, layout: Layout) -> Tensor | None:
        return layout.is_anchor

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor:
        """(H, D) float32: mean un-rotated query of the question's tokens."""
        n_last = len(layout.question)
        queries = probed.queries[:, -n_last:].transpose(0, 1).float()
        return unrotate(queries, probed.cos[-n_last:], probed.sin[-n_last:]).mean(0)


def group_heads(queries: Tensor, n_kv_heads: int) -> Tensor:
    """(..., H, D) -> (..., G, D): mean over the query heads that share a key-value head.

    Consecutive query heads share one, as in transformers' ``repeat_kv``.
    """
    *lead, heads, dim = queries.shape
    return queries.reshape(*lead, n_kv_heads, heads // n_kv_heads, dim).mean(dim=-2)


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

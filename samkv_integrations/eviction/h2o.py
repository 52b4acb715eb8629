"""H2O (arXiv 2306.14048): heavy hitters by accumulated attention, and recent entries.

Zhang et al.: H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.eviction.base import (
    DroppingEviction,
    Keeper,
    Seen,
    best_of_heads,
    with_ends,
)


@dataclass(frozen=True, kw_only=True)
class H2O(DroppingEviction):
    """Half recent entries, half those that got most attention so far (arXiv 2306.14048, section 4).

    Per key-value head, and again with every token of the answer: the entry outside the recent half
    with the least accumulated attention goes (algorithm 1).

    Deviations: during the prompt nothing is evicted, its attention is accumulated whole and the
    choice made once, as in the authors' code. Attention is summed over the query heads that share a
    key-value head; the paper's models share none. Only entries computed for this question are known
    to attend: where a method reuses a cache, what its entries attended to when they were prefilled
    does not count.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "arXiv 2306.14048"
    summary: ClassVar[str] = "entries with most accumulated attention and as many recent ones"
    slides: ClassVar[bool] = True

    @property
    def min_tokens(self) -> int:
        return 2

    def keeper(self, budget: int) -> Keeper:
        return _HeavyHitters(budget)


class _HeavyHitters(Keeper):
    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._recent = budget // 2
        self._scores = torch.empty(0)  # (G, S) attention that each entry got
        self._order = torch.empty(0)  # (G, S) which entry came how late
        self._n_seen = 0

    def prompt(self, seen: Seen) -> Tensor | None:
        n_entries, n_kv_heads, _ = seen.keys.shape
        scores = seen.keys.new_zeros(n_kv_heads, n_entries, dtype=torch.float32)
        for weights in seen.weights():
            scores += weights.sum((1, 2))
        self._n_seen = n_entries
        self._scores = scores
        self._order = torch.arange(n_entries, device=scores.device).repeat(n_kv_heads, 1)
        if n_entries <= self.budget:
            return None
        older = scores[:, None, : n_entries - self._recent]
        heavy = best_of_heads(older, self.budget - self._recent)
        slots = with_ends(heavy, n_entries, last=self._recent)
        self._scores = scores.gather(1, slots.T)
        self._order = self._order.gather(1, slots.T)
        return slots

    def step(self, seen: Seen) -> int | Tensor | None:
        given = next(seen.weights()).sum((1, 2))
        scores = given.clone()
        scores[:, :-1] += self._scores
        newest = self._order.new_full((len(scores), 1), self._n_seen)
        order = torch.cat((self._order, newest), dim=1)
        self._n_seen += 1
        self._scores, self._order = scores, order
        if seen.n_entries <= self.budget:
            return None
        recent = order >= self._n_seen - self._recent
        slot = scores.masked_fill(recent, math.inf).argmin(1)
        heads = torch.arange(len(slot), device=slot.device)
        for entries in (scores, order):
            entries[heads, slot] = entries[:, -1].clone()
        self._scores, self._order = scores[:, :-1], order[:, :-1]
        return slot

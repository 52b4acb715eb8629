"""The interfaces of eviction rules, which drop entries or attend to a few of them at each step.

A rule is immutable data with a budget. The state of one answer is in an object for each layer: a
`Keeper` of a `DroppingEviction`, a `Chooser` of a `SparseEviction`. Both see tensors only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.methods.eviction import Eviction

TILE = 2**23
"""Attention weights (float32) in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The attention of one layer over its entries, which are in order of position.

    During decoding entries may be in any order, but the newest one is last.

    query: (H, R, D) after RoPE, of entries that have just been computed.
    slots: (R,) CPU, the slots of these entries; an entry sees the slots up to its own.
    keys: (S, G, D), rotated. scaling: the model's.
    """

    query: Tensor
    slots: Tensor
    keys: Tensor
    scaling: float

    @property
    def n_entries(self) -> int:
        """S, the entries of the layer."""
        return len(self.keys)

    def weights(self, since: int = 0) -> Iterator[Tensor]:
        """Weights of computed entries from slot ``since`` on, in tiles (G, H/G, r, S) float32."""
        n_entries, n_kv_heads, _ = self.keys.shape
        n_heads, device = len(self.query), self.keys.device
        keys = self.keys.permute(1, 2, 0).float()  # (G, D, S)
        columns = torch.arange(n_entries, device=device)
        computed = (self.slots >= since).nonzero()[:, 0]
        tile = max(1, TILE // (n_heads * n_entries))
        for start in range(0, len(computed), tile):
            entries = computed[start : start + tile]
            query = self.query[:, entries.to(device)].float() * self.scaling
            logits = query.reshape(n_kv_heads, -1, query.shape[-1]) @ keys
            later = columns > self.slots[entries].to(device)[:, None]
            logits = logits.view(n_kv_heads, -1, len(entries), n_entries).masked_fill(
                later, -math.inf
            )
            yield logits.softmax(-1)


class Keeper(ABC):
    """Decides which entries one layer keeps during one answer. It may have state, but no entries.

    budget: most entries to keep.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget

    @abstractmethod
    def prompt(self, seen: Seen) -> Tensor | None:
        """(budget, G) slots to keep after the prompt, ascending; None for all. Called first."""

    @abstractmethod
    def step(self, seen: Seen) -> int | Tensor | None:
        """The slot to evict after a token of the answer, or (G,) one of each head; None for none.

        The newest entry moves from the end to the evicted slot.
        """


class Once(Keeper):
    """Chooses once, after the prompt.

    choose: seen -> (budget, G) slots; called only with more than ``budget`` entries.
    recent: size of the window of last entries, whose oldest one each new entry replaces; with 0,
        entries of the answer come on top of the budget.
    """

    def __init__(self, budget: int, choose: Callable[[Seen], Tensor], recent: int = 0) -> None:
        super().__init__(budget)
        self._choose, self._recent, self._n_evicted = choose, recent, 0

    def prompt(self, seen: Seen) -> Tensor | None:
        return self._choose(seen) if seen.n_entries > self.budget else None

    def step(self, seen: Seen) -> int | Tensor | None:
        if not self._recent or seen.n_entries <= self.budget:
            return None
        # the recent entries are a ring buffer
        slot = self.budget - self._recent + self._n_evicted % self._recent
        self._n_evicted += 1
        return slot


@dataclass(frozen=True, kw_only=True)
class DroppingEviction(Eviction):
    """A rule that drops entries permanently."""

    slides: ClassVar[bool]
    """Whether the rule also evicts during the answer, and so never exceeds its budget."""

    @property
    def n_queries(self) -> int | None:
        """How many of the prompt's last tokens the rule needs queries of; None for all.

        Entries of all other tokens may come from memory, as a cached prefix.
        """
        return None

    @abstractmethod
    def keeper(self, budget: int) -> Keeper:
        """A new keeper for one layer of one answer."""

    def layer_budget(self, n_tokens: int, layer: int, n_layers: int) -> int:
        """Entries that ``layer`` may keep of a prompt of ``n_tokens``."""
        return self.budget(n_tokens)


Logits = Callable[[], Tensor]
"""Computes the logits (H, n) float32 of a step's query with the n context tokens of a layer."""


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Chooses the context tokens that each step of one answer attends to at one layer.

    count: tokens that a step attends to.
    choose: query (H, D), rotated, and its logits, which it may overwrite -> the (count,) tokens,
        ascending; and the logit (H,) of all others, as one token, or None to leave them out.
    """

    count: int
    choose: Callable[[Tensor, Logits], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class SparseEviction(Eviction):
    """A rule that drops nothing: each step attends to a few context tokens, of all heads the same.

    Tokens outside the context are always attended to. The context stays in its stored bits.

    budget_tokens, budget_ratio: context tokens that a step attends to.
    """

    @abstractmethod
    def chooser(self, budget: int, seen: Seen, context: Tensor) -> Chooser:
        """A new chooser for one layer of one answer, with more than ``budget`` context tokens.

        seen: the prompt's entries. context: (n,) slots of the context tokens, ascending.
        """


def best_of_heads(scores: Tensor, count: int) -> Tensor:
    """(G, count) columns, ascending: the best of all query heads that share a key-value head.

    scores: (G, H/G, N). A key-value head keeps the union of its query heads' best k, for the
    largest k that fits into ``count``. The next best columns of each query head fill the rest. If
    not all of them fit, the columns with the largest sum over the heads do.
    """
    ranks = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best = ranks.amin(1)  # (G, N), the best rank that any query head gives
    by_sum = scores.sum(1).argsort(dim=-1, descending=True, stable=True)
    order = by_sum.gather(-1, best.gather(-1, by_sum).argsort(dim=-1, stable=True))
    return order[:, :count].sort(-1).values


def with_ends(chosen: Tensor, n_entries: int, *, first: int = 0, last: int = 0) -> Tensor:
    """(first + K + last, G) slots: the chosen ones (G, K) between the first and last entries."""
    slots = torch.arange(n_entries, device=chosen.device).expand(len(chosen), -1)
    return torch.cat((slots[:, :first], chosen, slots[:, n_entries - last :]), dim=1).T

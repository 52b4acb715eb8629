"""What every eviction rule is made of: a budget, a look at attention, and a keeper of each layer.

Rules are data; what they know of one answer is in a `Keeper` of each layer. Both see tensors only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption

TILE = 2**23
"""Most attention weights that are held at once (float32)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The attention of one layer over the entries that it holds now, in order of position.

    While an answer is decoded only the newest entry must be in its place, which is the last one.

    query: (H, R, D) after RoPE, of entries that have just been computed.
    slots: (R,) where those lie among the held entries; an entry sees those up to its own.
    keys: (S, G, D), rotated. scaling: the model's.
    """

    query: Tensor
    slots: Tensor
    keys: Tensor
    scaling: float

    @property
    def n_entries(self) -> int:
        """S, the entries held."""
        return len(self.keys)

    def weights(self, since: int = 0) -> Iterator[Tensor]:
        """(G, H/G, r, S) float32, tile by tile, of the computed entries from slot ``since`` on."""
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
    """What one layer keeps during one answer. It may remember; the entries themselves it never has.

    budget: most entries that it keeps.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget

    @abstractmethod
    def prompt(self, seen: Seen) -> Tensor | None:
        """(budget, G) slots to keep after the prompt, ascending; None for all.

        Called once, before any `step`.
        """

    @abstractmethod
    def step(self, seen: Seen) -> int | Tensor | None:
        """The slot to give up now that an answer's token is in; None for none.

        The newest entry moves there from the end. One slot, or (G,) one a head.
        """


class Once(Keeper):
    """Evicts after the prompt, then lets the answer's entries come on top.

    choose: seen -> (budget, G) slots, asked only when there are more than ``budget`` entries.
    """

    def __init__(self, budget: int, choose: Callable[[Seen], Tensor]) -> None:
        super().__init__(budget)
        self._choose = choose

    def prompt(self, seen: Seen) -> Tensor | None:
        return self._choose(seen) if seen.n_entries > self.budget else None

    def step(self, seen: Seen) -> int | Tensor | None:
        return None


class Sliding(Once):
    """As `Once`, and then every new entry takes the place of the oldest of the ``recent`` last."""

    def __init__(self, budget: int, choose: Callable[[Seen], Tensor], recent: int) -> None:
        super().__init__(budget, choose)
        self._recent = recent
        self._n_evicted = 0

    def step(self, seen: Seen) -> int | Tensor | None:
        if seen.n_entries <= self.budget:
            return None
        # the recent entries are a ring: what was written longest ago is the oldest
        slot = self.budget - self._recent + self._n_evicted % self._recent
        self._n_evicted += 1
        return slot


@dataclass(frozen=True, kw_only=True)
class Eviction(ABC):
    """A rule that says which entries of the working cache an answer goes on with.

    Subclass `DroppingEviction`: beside `Quest` the engine knows no other kind.

    budget_tokens, budget_ratio: entries a layer and head, or that as a share of the logical prompt;
        exactly one of the two. A share is never taken below `min_tokens`.

    Raises InvalidOption for a budget that the rule cannot keep to.
    """

    budget_tokens: int | None = None
    budget_ratio: float | None = None

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]

    def __post_init__(self) -> None:
        tokens, ratio = self.budget_tokens, self.budget_ratio
        if (tokens is None) == (ratio is None):
            raise InvalidOption(
                f"budget_tokens={tokens} and budget_ratio={ratio} of {self.name!r}; give exactly "
                "one of them, and set the other one to None"
            )
        if ratio is not None and not 0 < ratio <= 1:
            raise InvalidOption(
                f"budget_ratio={ratio} of {self.name!r}; it must be above 0 and at most 1, a share "
                "of the prompt (give budget_tokens for a number of entries)"
            )
        if tokens is not None and not (type(tokens) is int and tokens >= self.min_tokens):
            raise InvalidOption(
                f"budget_tokens={tokens} of {self.name!r}; with its other options it keeps at "
                f"least {self.min_tokens} entries, give a whole number from {self.min_tokens} on"
            )

    @property
    @abstractmethod
    def min_tokens(self) -> int:
        """The smallest budget that leaves room for what it must keep."""

    def budget(self, n_tokens: int) -> int:
        """Entries a layer, mean over the layers."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_ratio is not None
        return max(self.min_tokens, math.floor(self.budget_ratio * n_tokens))

    def _at_least(self, option: str, least: int) -> None:
        value = getattr(self, option)
        if type(value) is not int or value < least:
            raise InvalidOption(
                f"{option}={value!r} of {self.name!r}; it must be a whole number from {least} on"
            )


@dataclass(frozen=True, kw_only=True)
class DroppingEviction(Eviction):
    """A rule that drops entries for good."""

    slides: ClassVar[bool]
    """Whether it evicts during the answer too, and so never holds more than its budget."""

    @property
    def n_queries(self) -> int | None:
        """Of how many of the prompt's last entries it wants the queries; None for all.

        The others may then be entries that were computed for an earlier prompt.
        """
        return None

    @abstractmethod
    def keeper(self, budget: int) -> Keeper:
        """A keeper of one layer for one answer."""

    def layer_budget(self, n_tokens: int, layer: int, n_layers: int) -> int:
        """Rows that ``layer`` may keep of a logical prompt of ``n_tokens``."""
        return self.budget(n_tokens)


def best_of_heads(scores: Tensor, count: int) -> Tensor:
    """(G, count) columns, ascending: the best of every query head that shares a key-value head.

    scores: (G, H/G, N). A key-value head keeps the union of its query heads' best k, with the
    largest k for which that fits into ``count``, and the rest is filled with the next best of each
    in turn; where only some of one rank fit, those of the largest sum over the heads.
    """
    ranks = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best = ranks.amin(1)  # (G, N), the rank that the keenest head gives
    by_sum = scores.sum(1).argsort(dim=-1, descending=True, stable=True)
    order = by_sum.gather(-1, best.gather(-1, by_sum).argsort(dim=-1, stable=True))
    return order[:, :count].sort(-1).values


def with_ends(chosen: Tensor, n_entries: int, *, first: int = 0, last: int = 0) -> Tensor:
    """(first + K + last, G) slots: those chosen, (G, K), between the first and the last entries."""
    slots = torch.arange(n_entries, device=chosen.device).expand(len(chosen), -1)
    return torch.cat((slots[:, :first], chosen, slots[:, n_entries - last :]), dim=1).T

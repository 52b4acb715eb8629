"""Rules that evict once, after the prompt: `SnapKV` and `PyramidKV`.

Li et al.: LLM Knows What You are Looking for Before Generation. Cai et al.: Dynamic KV Cache
Compression based on Pyramidal Information Funneling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction.base import (
    DroppingEviction,
    Keeper,
    Once,
    Seen,
    best_of_heads,
    with_ends,
)


@dataclass(frozen=True, kw_only=True)
class SnapKV(DroppingEviction):
    """The prompt's last entries, and those that they attend to (sections 3 and 4).

    Evicts once after the prompt; the answer's entries come on top of the budget. Attention is
    summed over the window, pooled over neighbouring entries and ranked for each head (arXiv
    2404.14469, listing 1).

    window: last entries, whose attention counts and which always stay. kernel: entries of a
    neighbourhood. Defaults are those of the paper's LongBench runs, as is pooling by the maximum.

    Deviations: query heads that share a key-value head share its budget (`best_of_heads`); the
    paper's code repeats key-value heads for each query head. In the window only entries computed
    for this question attend, as those of the question always are. Neighbours are neighbours among
    the entries that the method kept.
    """

    window: int = 32
    kernel: int = 7

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "arXiv 2404.14469"
    summary: ClassVar[str] = "entries that the end of the prompt attends to, pooled; once"
    slides: ClassVar[bool] = False
    at_least: ClassVar[Mapping[str, int]] = {"window": 1, "kernel": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise InvalidOption(
                f"kernel={self.kernel} of {self.name!r}; it must be odd, so that an entry is in "
                f"the middle of its neighbourhood: give {self.kernel - 1} or {self.kernel + 1}"
            )

    @property
    def min_tokens(self) -> int:
        return self.window + 1

    @property
    def n_queries(self) -> int:
        return self.window

    def keeper(self, budget: int) -> Keeper:
        def choose(seen: Seen) -> Tensor:
            chosen = best_of_heads(self._scores(seen), budget - self.window)
            return with_ends(chosen, seen.n_entries, last=self.window)

        return Once(budget, choose)

    def _scores(self, seen: Seen) -> Tensor:
        """(G, H/G, S - window), pooled attention of the window to the entries before it."""
        before = seen.n_entries - self.window
        tiles = [weights[..., :before].sum(2) for weights in seen.weights(before)]
        given = torch.stack(tiles).sum(0)
        return F.max_pool1d(given, self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """`SnapKV` with budgets that fall in equal steps from the lowest layer to the highest one.

    arXiv 2406.02069, section 4.2. With b entries per layer besides the window, the highest layer
    keeps b / beta of them and the lowest 2 b - b / beta, so that the mean is b. If the prompt has
    fewer entries than that, the lowest layer keeps all, and the highest one gets the rest.

    beta: the steepness (20 in the paper). window, kernel: see `SnapKV`.

    Deviations: those of `SnapKV`. The authors' code rounds the step; here the budget of each layer
    is rounded down, so the mean never exceeds the budget. As there, a prompt shorter than 2 b gets
    the same budget in every layer. The entries of the prompt count even where a method kept fewer.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "arXiv 2406.02069"
    summary: ClassVar[str] = "snapkv with more entries in lower layers, fewer in higher ones"
    at_least: ClassVar[Mapping[str, int]] = {"beta": 1, **SnapKV.at_least}

    def layer_budget(self, n_tokens: int, layer: int, n_layers: int) -> int:
        budget = self.budget(n_tokens)
        mean = budget - self.window
        if n_layers == 1 or n_tokens <= budget or n_tokens < 2 * mean:
            return budget
        low = mean // self.beta
        high = min(2 * mean - low, n_tokens - self.window)
        low = 2 * mean - high
        return self.window + (high * (n_layers - 1) - (high - low) * layer) // (n_layers - 1)

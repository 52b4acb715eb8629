"""SnapKV (arXiv 2404.14469): what the end of the prompt attends to.

Li et al.: SnapKV: LLM Knows What You are Looking for Before Generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

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

Pooling = Literal["max", "average"]


@dataclass(frozen=True, kw_only=True)
class SnapKV(DroppingEviction):
    """The prompt's last entries, and those that their tokens attend to (sections 3 and 4).

    Once after the prompt; the answer's entries come on top of the budget. Attention is summed over
    the window, pooled over neighbouring entries and compared per head (arXiv 2404.14469, listing
    1).

    window: entries at the end that look and always stay. kernel, pooling: of the neighbourhood. The
    defaults are those of the paper's LongBench runs.

    Deviations: a query head that shares its key-value head with others chooses only its part of
    the entries (`best_of_heads`); the paper's code stores key-value heads once for every query
    head. Of the window only entries computed for this question look, which the question's always
    are. Neighbours are those among the entries that the method kept.
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "arXiv 2404.14469"
    summary: ClassVar[str] = "entries that the end of the prompt attends to, pooled; once"
    slides: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._at_least("window", 1)
        self._at_least("kernel", 1)
        if self.kernel % 2 == 0:
            raise InvalidOption(
                f"kernel={self.kernel} of {self.name!r}; it must be odd, so that an entry is in "
                f"the middle of its neighbourhood: give {self.kernel - 1} or {self.kernel + 1}"
            )
        if self.pooling not in get_args(Pooling):
            raise InvalidOption(
                f"pooling={self.pooling!r} of {self.name!r}; "
                f"allowed: {', '.join(get_args(Pooling))}"
            )
        super().__post_init__()

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
        if self.pooling == "max":
            return F.max_pool1d(given, self.kernel, stride=1, padding=self.kernel // 2)
        return F.avg_pool1d(given, self.kernel, stride=1, padding=self.kernel // 2)

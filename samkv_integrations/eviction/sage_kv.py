"""SAGE-KV (arXiv 2503.08879): what the last prompt token attends to, head by head.

Wang et al.: LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction for Efficient
Long-Context Inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.eviction.base import (
    DroppingEviction,
    Keeper,
    Seen,
    Sliding,
    best_of_heads,
    with_ends,
)


@dataclass(frozen=True, kw_only=True)
class SageKV(DroppingEviction):
    """Sinks, what the last prompt token attends to, and a recent window (section 2).

    Of a budget of B entries B/4 are the first ones, B/4 the most recent ones, and every query head
    chooses B/2 over the number of query heads that share a key-value head (arXiv 2503.08879,
    appendix A.2). Chosen once; after that every new entry is added to the recent window, and its
    oldest entry goes (step 4).

    Deviations: entries chosen by several query heads of a key-value head count once, and the room
        is filled with their next best (`best_of_heads`). The last prompt token is the newest entry
        of the recent window, where the paper counts it on top. What rounding B/4 leaves goes to the
        chosen entries. A layer that holds fewer entries than the budget first grows up to it.
    """

    name: ClassVar[str] = "sage-kv"
    paper: ClassVar[str] = "arXiv 2503.08879"
    summary: ClassVar[str] = "first entries, those the last prompt token attends to, recent ones"
    slides: ClassVar[bool] = True

    @property
    def min_tokens(self) -> int:
        return 4

    @property
    def n_queries(self) -> int:
        return 1

    def keeper(self, budget: int) -> Keeper:
        end = budget // 4

        def choose(seen: Seen) -> Tensor:
            n_entries = seen.n_entries
            given = torch.cat([weights.sum(2) for weights in seen.weights(n_entries - 1)])
            chosen = best_of_heads(given[..., end : n_entries - end], budget - 2 * end) + end
            return with_ends(chosen, n_entries, first=end, last=end)

        return Sliding(budget, choose, end)

"""Eviction in a running answer: a rule's choices, carried out in the working cache."""

from __future__ import annotations

import torch
from torch import Tensor

from samkv_integrations.engine.dense_cache import DenseCache
from samkv_integrations.eviction.base import DroppingEviction, Seen


class Evictor:
    """One rule during one answer.

    A layer's entries are evicted as soon as the prompt's pass is done with that layer, so that the
    working cache is never whole. The first token has read all entries of every layer all the same.

    Args:
        rule: what to keep.
        n_tokens: the logical prompt.
        n_layers: of the model.
        capacity: entries that the answer may add.
    """

    def __init__(
        self, rule: DroppingEviction, *, n_tokens: int, n_layers: int, capacity: int
    ) -> None:
        self._slides = rule.slides
        self._capacity = capacity
        self._keepers = [
            rule.keeper(rule.layer_budget(n_tokens, layer, n_layers)) for layer in range(n_layers)
        ]

    def after_prompt(
        self, cache: DenseCache, layer: int, query: Tensor, slots: Tensor, scaling: float
    ) -> None:
        """Shrink a layer to what the rule keeps, and make room for the answer.

        query: (H, R, D) after RoPE, slots: (R,), see `Seen`.
        """
        n_entries, keeper = cache.lengths[layer], self._keepers[layer]
        keys = cache.keys[layer][:n_entries]
        kept = keeper.prompt(Seen(query=query, slots=slots, keys=keys, scaling=scaling))
        n_kept = n_entries if kept is None else len(kept)
        room = n_kept + self._capacity
        if self._slides:  # one more entry, for the token that has come and has not evicted yet
            room = max(n_kept, min(room, keeper.budget + 1))
        cache.keep(layer, kept, room)

    def after_step(self, cache: DenseCache, layer: int, query: Tensor, scaling: float) -> None:
        """Let the rule give up an entry for the one that has just come. query: (H, 1, D)."""
        if not self._slides:
            return
        n_entries = cache.lengths[layer]
        keys, slots = cache.keys[layer][:n_entries], torch.tensor([n_entries - 1])
        slot = self._keepers[layer].step(Seen(query=query, slots=slots, keys=keys, scaling=scaling))
        if slot is not None:
            cache.evict(layer, slot)

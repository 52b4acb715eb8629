"""A working cache of rotated keys and values, which an eviction may thin out."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from samkv_integrations.engine.working_cache import LayerEntries, WorkingCache, as_heads, room_for
from samkv_integrations.methods.base import ContextAttention
from samkv_integrations.model.attention import attention


class Evict(Protocol):
    """Thins out a `DenseCache`, see `evictor.Evictor`."""

    def after_prompt(
        self, cache: DenseCache, layer: int, query: Tensor, slots: Tensor, scaling: float
    ) -> None: ...

    def after_step(self, cache: DenseCache, layer: int, query: Tensor, scaling: float) -> None: ...


class DenseCache(WorkingCache):
    """Rotated keys and values, with room for the answer's tokens.

    Layers may hold different numbers of entries; ``lengths`` counts them. Their order is position
    order until an eviction slides; from then on an entry is known by its key alone. Key-value heads
    of a layer hold as many entries as each other, which need not be the same ones.

    capacity: tokens that the answer may add. evictor: takes entries out. weigh: how a step weighs
    the context against the rest, None as the model does.
    """

    def __init__(
        self,
        n_layers: int,
        capacity: int,
        *,
        evictor: Evict | None = None,
        weigh: ContextAttention | None = None,
    ) -> None:
        self.keys: list[Tensor] = [torch.empty(0)] * n_layers  # each (S + room, G, D)
        self.values: list[Tensor] = [torch.empty(0)] * n_layers
        self.context: list[Tensor] = [torch.empty(0)] * n_layers  # each (S + room, G, 1) bool
        self.lengths: list[int] = [0] * n_layers
        self._kept: list[Tensor | None] = [None] * n_layers  # (K, G) slots after an eviction
        self.room = 0 if evictor else capacity
        self._evictor = evictor
        self._weigh = weigh
        self._sides = [self.keys, self.values, *([self.context] if weigh else [])]

    @property
    def kv_bytes(self) -> int:
        entries = self.keys[0]
        return 2 * sum(self.lengths) * entries.shape[1:].numel() * entries.element_size()

    def attended(self, layer: int, of_chunks: Tensor) -> float:
        slots = self._kept[layer]
        if slots is None:
            return super().attended(layer, of_chunks)
        return int(of_chunks[slots.cpu()].sum()) / slots.shape[1]

    def take(self, layer: int, entries: LayerEntries) -> None:
        self.keys[layer], self.values[layer] = entries.keys, entries.values
        self.lengths[layer] = entries.n_entries
        self.prompt_bytes += 2 * entries.keys[: entries.n_entries].nbytes
        if self._weigh is not None:
            of_context = entries.is_context.new_zeros(len(entries.keys), dtype=torch.bool)
            of_context[: entries.n_entries] = entries.is_context
            self.context[layer] = of_context[:, None, None].repeat(1, entries.keys.shape[1], 1)
        if self._evictor is not None:
            self._evictor.after_prompt(
                self, layer, entries.queries, entries.query_slots, entries.scaling
            )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self.append(layer, key[0, :, 0], value[0, :, 0])
        if self._weigh is None:
            output = attention(query, keys, values, scaling, None, False)
        else:
            output = self._weigh(query, keys, values, scaling, None, self.is_context(layer))
        if self._evictor is not None:
            self._evictor.after_step(self, layer, query[0], scaling)
        return output

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add one entry, (G, D) each; returns all as (1, G, S, D)."""
        length = self.lengths[layer]
        self.keys[layer][length] = key
        self.values[layer][length] = value
        if self._weigh is not None:
            self.context[layer][length] = False
        self.lengths[layer] = length + 1
        return as_heads(self.keys[layer][: length + 1]), as_heads(self.values[layer][: length + 1])

    def is_context(self, layer: int) -> Tensor:
        """(G, S) bool: which entries are of the context."""
        return self.context[layer][: self.lengths[layer], :, 0].T

    def keep(self, layer: int, slots: Tensor | None, room: int) -> None:
        """Move a layer into tensors of ``room`` entries; the old ones are freed.

        slots: (K, G) the entries that each head keeps, None for all.
        """
        for side in self._sides:
            entries = side[layer][: self.lengths[layer]]
            n_kept = len(entries) if slots is None else len(slots)
            moved = room_for(room, entries)
            if slots is not None:
                at = slots.to(entries.device)[..., None].expand(-1, -1, entries.shape[-1])
                entries = entries.gather(0, at)
            moved[:n_kept] = entries
            side[layer] = moved
        self.lengths[layer], self._kept[layer] = n_kept, slots

    def evict(self, layer: int, slot: int | Tensor) -> None:
        """The last entry takes the place of entry ``slot``, or of ``slot[g]`` (G,) of each head."""
        last = self.lengths[layer] - 1
        for entries in (side[layer] for side in self._sides):
            if isinstance(slot, int):
                entries[slot] = entries[last]
            else:
                heads = torch.arange(len(slot), device=slot.device)
                entries[slot, heads] = entries[last].clone()
        self.lengths[layer] = last

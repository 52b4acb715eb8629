"""The working cache: the KV entries that an answer's tokens after the first attend to.

`DenseCache` has all entries, or those that an eviction rule keeps. `SparseCache` has the context in
its stored bits, and each step attends to a few context tokens.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.errors import InvalidOption
from samkv_integrations.runtimes.base import FirstEntries
from samkv_integrations.runtimes.transformers.entries.quantise import Entries
from samkv_integrations.runtimes.transformers.eviction.base import (
    Chooser,
    DroppingEviction,
    Seen,
    SparseEviction,
)
from samkv_integrations.runtimes.transformers.model.attention import (
    attention,
    attention_of_token,
    suits_products,
)
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.papers.base import ContextAttention
from samkv_integrations.runtimes.transformers.passes.loader import CachedEntries


class LayerwiseEntries(FirstEntries, Protocol):
    """Rotated entries of a prompt's first tokens, for kept sequences."""

    def of_layer(self, layer: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values (n_tokens, G, D) of the first tokens at a layer."""
        ...

    def most_within(self, n_tokens: int) -> int:
        """``n_tokens``: entries of any beginning can be taken."""
        return n_tokens


@dataclass(frozen=True, kw_only=True)
class CopiedEntries(LayerwiseEntries):
    """Copies of the entries of the first ``n_tokens`` tokens. A pass adds them layer by layer.

    They serve answers whose working cache lacks some of these entries.
    """

    n_tokens: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Copy the entries of the first tokens at the next layer. keys, values: (S, G, D) each."""
        self.keys.append(keys[: self.n_tokens].clone())
        self.values.append(values[: self.n_tokens].clone())

    def of_layer(self, layer: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][:n_tokens], self.values[layer][:n_tokens]

    @property
    def n_bytes(self) -> int:
        return sum(side.nbytes for side in (*self.keys, *self.values))


@dataclass(frozen=True, kw_only=True)
class ContextSlots:
    """The slots of context tokens with a cache at a layer.

    tokens: (n,) these context tokens; slots: (n,) the slots of their entries.
    changed: (d,) indices into the n tokens whose entry differs from the stored one.
    other_slots: the slots of all other entries.
    """

    tokens: Tensor
    slots: Tensor
    changed: Tensor
    other_slots: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerEntries:
    """The KV entries that a pass leaves at a layer, in prompt order.

    keys, values: (S + room, G, D), keys rotated, see `room_for`; the first S are the prompt's.
    n_entries: S. is_context: (S,) bool, entries of context tokens with a cache; context: the same
        entries, by slot.
    queries: (H, R, D), rotated, of computed tokens that stay; query_slots: (R,) CPU, slots of these
        tokens.
    scaling: that of the layer's attention.
    window: that of the layer, see `Model.windows`. positions: (S,) CPU; needed for a window.
    """

    keys: Tensor
    values: Tensor
    n_entries: int
    is_context: Tensor
    context: ContextSlots
    queries: Tensor
    query_slots: Tensor
    scaling: float
    window: int | None = None
    positions: Tensor | None = None

    @property
    def seen(self) -> Seen:
        """The part of it that an eviction rule sees."""
        return Seen(
            query=self.queries, slots=self.query_slots, keys=self.keys[: self.n_entries],
            scaling=self.scaling,
        )  # fmt: skip


class WorkingCache(ABC):
    """KV entries of one answer, layer by layer.

    prompt_bytes: bytes of the prompt's entries, before any eviction. lengths: numbers of entries of
    the layers that a step adds to.
    """

    prompt_bytes: int = 0
    lengths: list[int]

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of the present entries, without room for further ones."""

    @abstractmethod
    def attended(self, layer: int, n_of_chunks: int, of_chunks: Callable[[], Tensor]) -> float:
        """Chunk tokens that the first step attends to at a layer, mean over key-value heads.

        n_of_chunks: number of chunk tokens among the S entries of the prompt pass; of_chunks:
        returns (S,) bool, CPU, the entries of these tokens.
        """

    @abstractmethod
    def take(self, layer: int, entries: LayerEntries) -> None:
        """Store the entries that the prompt's pass leaves at a layer."""

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Add a token and attend. key, value: (1, G, 1, D); query and result: (1, H, 1, D)."""

    @property
    @abstractmethod
    def can_rewind(self) -> bool:
        """Whether tokens of the answer can be taken back: no rule has evicted entries for them."""

    def rewind(self, n_tokens: int) -> None:
        """Take back the last tokens that were added."""
        self.lengths = [max(0, length - n_tokens) for length in self.lengths]

    def put_back(self) -> None:  # noqa: B027  # most caches have no such entries
        """After the last step: restore the entries that were recomputed for this answer alone."""


def as_heads(entries: Tensor) -> Tensor:
    """(S, heads, D) -> (1, heads, S, D), without a copy."""
    return entries.transpose(0, 1).unsqueeze(0)


def room_for(n_entries: int, like: Tensor) -> Tensor:
    """A tensor of at least ``n_entries`` entries (S, G, D), of dtype and device of ``like``.

    All entries behind ``n_entries`` are zeros; they fill a multiple of 128, so that the products of
    steps have few shapes. The entries of a head are contiguous: so a decoding step takes little
    more than half the time that it takes with strided rows.
    """
    n_heads, size = like.shape[1:]
    entries = like.new_empty(n_heads, n_entries + -n_entries % 128, size).transpose(0, 1)
    entries[n_entries:] = 0
    return entries


def rooms_for(n_entries: int, like: Tensor, least: int = 0) -> Tensor:
    """(2, S, G, D): `room_for` keys and values together, with at least ``least`` entries."""
    n_heads, size = like.shape[1:]
    n_rooms = max(n_entries, least)
    entries = like.new_empty(2, n_heads, n_rooms + -n_rooms % 128, size).transpose(1, 2)
    if like.device.type == "cpu" or least > n_entries:  # a GPU reads no entries behind
        entries[:, n_entries:] = 0
    return entries


def _attention(
    model: LayeredModel | None, layer: int, query: Tensor, keys: Tensor, values: Tensor,
    scaling: float, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The attention of a step: query (1, H, 1, D) over all entries, as the layer computes it."""
    if model is None:
        return attention(query, keys, values, scaling, mask, False)
    return model.attention(layer, query, keys, values, scaling, mask, False)


class DenseCache(WorkingCache, LayerwiseEntries):
    """Rotated keys, and values, with room for the answer's tokens; an eviction rule may drop some.

    Layers may have different numbers of entries, ``lengths``. Entries are in position order until a
    sliding rule evicts during the answer. All key-value heads of a layer have the same number of
    entries, but not necessarily entries of the same tokens.

    Entries of a layer are evicted as soon as the prompt pass has computed that layer, so the cache
    before eviction never exists as a whole. The first token attends to all entries nevertheless.

    capacity: tokens that the answer may add. n_tokens: tokens of the prompt. rule: chooses the
    entries to keep, None for all. method_attention: the method's own attention in a step, None for
    the model's. model: computes the attention of its layers; None for plain attention.
    keeps_all: whether entries behind a sliding window stay, for later prompts. Otherwise a layer
    with a sliding window keeps only the entries that the next token sees: there the window evicts,
    and the rule does not.
    """

    def __init__(
        self,
        n_layers: int,
        capacity: int,
        *,
        n_tokens: int = 0,
        rule: DroppingEviction | None = None,
        method_attention: ContextAttention | None = None,
        model: LayeredModel | None = None,
        keeps_all: bool = False,
    ) -> None:
        self.keys: list[Tensor] = [torch.empty(0)] * n_layers  # each (S + room, G, D)
        self.values: list[Tensor] = [torch.empty(0)] * n_layers
        self.context: list[Tensor] = [torch.empty(0)] * n_layers  # each (S + room, G, 1) bool
        self.lengths: list[int] = [0] * n_layers
        self._entry_bytes = 0  # bytes of a token at a layer
        self._kept: list[Tensor | None] = [None] * n_layers  # (K, G) slots after an eviction
        self._capacity = capacity
        self._slides = rule is not None and rule.slides
        self._keepers = rule and [
            rule.keeper(rule.layer_budget(n_tokens, layer, n_layers)) for layer in range(n_layers)
        ]
        self._method_attention = method_attention
        self._model, self._n_tokens = model, n_tokens
        self._keeps_all = keeps_all
        self._is_plain = method_attention is None and (model is None or model.scores_plainly)
        self._windows: dict[int, tuple[int, Tensor]] = {}  # of layers: window, positions (S + room)
        self._lent: tuple[Tensor, LayerwiseEntries] | None = None
        self._sides = [self.keys, self.values, *([self.context] if method_attention else [])]

    @property
    def kv_bytes(self) -> int:
        return sum(self.lengths) * self._entry_bytes

    @property
    def n_bytes(self) -> int:
        return sum(side.nbytes for side in (*self.keys, *self.values))

    def of_layer(self, layer: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][:n_tokens], self.values[layer][:n_tokens]

    def attended(self, layer: int, n_of_chunks: int, of_chunks: Callable[[], Tensor]) -> float:
        slots = self._kept[layer]
        if slots is None:
            return n_of_chunks
        return int(of_chunks()[slots.cpu()].sum()) / slots.shape[1]

    def take(self, layer: int, entries: LayerEntries) -> None:
        self.keys[layer], self.values[layer] = entries.keys, entries.values
        self.lengths[layer] = n_entries = entries.n_entries
        self._entry_bytes = 2 * entries.keys[:1].nbytes
        self.prompt_bytes += n_entries * self._entry_bytes
        if self._method_attention is not None:
            of_context = entries.is_context.new_zeros(len(entries.keys), dtype=torch.bool)
            of_context[:n_entries] = entries.is_context
            self.context[layer] = of_context[:, None, None].repeat(1, entries.keys.shape[1], 1)
        most = self._n_tokens + self._capacity
        positions, window = entries.positions, entries.window
        if positions is not None and window is not None and window < most:
            self._trim(layer, positions, window)
        elif self._keepers:
            slots, n_kv_heads = self._keepers[layer].prompt(entries.seen), entries.keys.shape[1]
            if slots is None:
                return
            if slots.shape[1:] != (n_kv_heads,):
                raise InvalidOption(
                    f"a keeper chose slots of shape {tuple(slots.shape)}; it must be "
                    f"({self._keepers[layer].budget}, {n_kv_heads}), key-value heads last"
                )
            self.keep(layer, slots)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        last = self.lengths[layer]
        if last == len(self.keys[layer]):
            self._move(layer, 0)
        shape = self.keys[layer].shape[1:]
        self.keys[layer][last] = key.reshape(shape)
        self.values[layer][last] = value.reshape(shape)
        if self._method_attention is not None:
            self.context[layer][last] = False
        self.lengths[layer] = n_entries = last + 1
        first = 0
        if layer in self._windows:
            window, at = self._windows[layer]
            first = int(torch.searchsorted(at[:n_entries], at[last] - window, right=True))
        keys, values = self.keys[layer], self.values[layer]
        if not first and self._is_plain and suits_products(query, n_entries):
            # Not the room that a rejected draft left: sums over it would be rounded differently.
            size = n_entries + -n_entries % 128
            keys, values = keys[:size].transpose(0, 1), values[:size].transpose(0, 1)
            output = attention_of_token(query, keys, values, scaling, n_entries)
        else:
            keys, values = as_heads(keys[first:n_entries]), as_heads(values[first:n_entries])
            if self._method_attention is None:
                output = _attention(self._model, layer, query, keys, values, scaling)
            else:
                is_context = self.is_context(layer)[:, first:]
                output = self._method_attention(query, keys, values, scaling, None, is_context)
        if self._keepers and self._slides and layer not in self._windows:
            seen = Seen(
                query=query[0], slots=torch.tensor([last]),
                keys=self.keys[layer][:n_entries], scaling=scaling,
            )  # fmt: skip
            if (slot := self._keepers[layer].step(seen)) is not None:
                self.evict(layer, slot)
        return output

    @property
    def can_rewind(self) -> bool:
        return not (self._keepers and self._slides)

    def lend(self, positions: Tensor, entries: LayerwiseEntries) -> None:
        """Note that the entries at these positions were recomputed for this answer alone.

        entries: the entries that `put_back` restores, of all tokens up to the last position.
        """
        self._lent = positions, entries

    def put_back(self) -> None:
        if self._lent is None:
            return
        (positions, entries), self._lent = self._lent, None
        for layer, mine in enumerate(zip(self.keys, self.values, strict=True)):
            at = positions.to(mine[0].device)
            theirs = entries.of_layer(layer, int(positions[-1]) + 1)
            for side, original in zip(mine, theirs, strict=True):
                side[at] = original[at]

    def is_context(self, layer: int) -> Tensor:
        """(G, S) bool: the entries of the context."""
        return self.context[layer][: self.lengths[layer], :, 0].T

    def keep(self, layer: int, slots: Tensor) -> None:
        """Move the entries at (K, G) slots of a layer into new tensors with room for the answer."""
        for side in self._sides:
            entries = side[layer][: self.lengths[layer]]
            at = slots.to(entries.device)[..., None].expand(-1, -1, entries.shape[-1])
            moved = room_for(len(slots), entries)
            moved[: len(slots)] = entries.gather(0, at)
            side[layer] = moved
        self.lengths[layer], self._kept[layer] = len(slots), slots

    def _trim(self, layer: int, at: Tensor, window: int) -> None:
        """Keep the entries that the next token sees, or let steps attend to these only."""
        n_entries = self.lengths[layer]
        first = int((at <= self._n_tokens - window).sum())
        later = torch.arange(self._n_tokens, self._n_tokens + self._capacity)
        if not self._keeps_all:
            self._move(layer, first)
            at = at[first:]
        self._windows[layer] = window, torch.cat((at, later))
        slots = torch.arange(first, n_entries)[:, None]
        self._kept[layer] = slots.expand(-1, self.keys[layer].shape[1])

    def _move(self, layer: int, first: int) -> None:
        """Move the entries from ``first`` on into new tensors with room for more."""
        n_entries = self.lengths[layer]
        # all tensors before any is replaced: the device may lack memory for a later one
        moved = [room_for(n_entries - first + 1, side[layer]) for side in self._sides]
        for side, room in zip(self._sides, moved, strict=True):
            room[: n_entries - first] = side[layer][first:n_entries]
            side[layer] = room
        self.lengths[layer] = n_entries - first

    def evict(self, layer: int, slot: int | Tensor) -> None:
        """Replace entry ``slot``, or ``slot[g]`` (G,) of each head, by the last entry."""
        last = self.lengths[layer] - 1
        for entries in (side[layer] for side in self._sides):
            if isinstance(slot, int):
                entries[slot] = entries[last]
            else:
                heads = torch.arange(len(slot), device=slot.device)
                entries[slot, heads] = entries[last].clone()
        self.lengths[layer] = last


class SparseCache(WorkingCache):
    """Context tokens in their stored format, and all other tokens as rotated keys, and values.

    A step attends to the context tokens that the rule chooses. Their keys and values are computed
    for the step, one layer at a time. If the rule gives a logit for all other context tokens, these
    count as one token with the mean value of the context, unless the method has its own attention.

    ``kv_bytes`` omits the tensors of the rule, and the cos and sin of the context's positions,
    which all layers share.

    Args:
        cached: gives the entries of a layer when `take` is called for that layer.
        rule: chooses the context tokens of a step. budget: most context tokens of a step.
        capacity: tokens that the answer may add.
        method_attention: the method's own attention in a step, None for the model's.
        n_tokens: tokens of the prompt. model: computes the attention of its layers; None for plain
            attention.

    A layer with a sliding window attends to everything in its window.
    """

    def __init__(
        self,
        n_layers: int,
        cached: CachedEntries,
        rule: SparseEviction,
        budget: int,
        capacity: int,
        method_attention: ContextAttention | None = None,
        *,
        n_tokens: int = 0,
        model: LayeredModel | None = None,
    ) -> None:
        self._near = DenseCache(
            n_layers, capacity, n_tokens=n_tokens, method_attention=method_attention, model=model
        )
        self._is_near = [False] * n_layers
        self._most, self._model = n_tokens + capacity, model
        self._n_layers, self._cached = n_layers, cached
        self._rule, self._budget, self._capacity = rule, budget, capacity
        self._method_attention = method_attention
        self._context: list[Entries | None] = [None] * n_layers
        self._choosers: list[Chooser | None] = [None] * n_layers  # None to attend to all entries
        self._mean_value: list[Tensor] = [torch.empty(0)] * n_layers  # (1, G, D), of the context
        self._keys: list[Tensor] = [torch.empty(0)] * n_layers  # (S + capacity, G, D), the rest
        self._values: list[Tensor] = [torch.empty(0)] * n_layers
        self._lengths = [0] * n_layers

    @property
    def lengths(self) -> list[int]:
        """Those of the layers with a small window, then those of all other layers."""
        return [*self._near.lengths, *self._lengths]

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._near.lengths, self._lengths = lengths[: self._n_layers], lengths[self._n_layers :]

    @property
    def kv_bytes(self) -> int:
        rest = self._near.kv_bytes
        rest += sum(2 * keys[:n].nbytes for keys, n in zip(self._keys, self._lengths, strict=True))
        means = sum(mean.nbytes for mean in self._mean_value)
        return rest + means + sum(held.n_bytes for held in self._context if held is not None)

    def attended(self, layer: int, n_of_chunks: int, of_chunks: Callable[[], Tensor]) -> float:
        if self._is_near[layer]:
            return self._near.attended(layer, n_of_chunks, of_chunks)
        chooser, context = self._choosers[layer], self._context[layer]
        n_left_out = 0 if chooser is None or context is None else len(context) - chooser.count
        return n_of_chunks - n_left_out

    def take(self, layer: int, entries: LayerEntries) -> None:
        self._is_near[layer] = entries.window is not None and entries.window < self._most
        if self._is_near[layer]:
            self._near.take(layer, entries)
        else:
            self._take(layer, entries)
        if layer == self._n_layers - 1:
            self.prompt_bytes = self.kv_bytes

    def _take(self, layer: int, entries: LayerEntries) -> None:
        of_context, others = entries.context, entries.context.other_slots
        room = (0, 0, 0, 0, 0, self._capacity)
        self._keys[layer] = pad(entries.keys.index_select(0, others), room)
        self._values[layer] = pad(entries.values.index_select(0, others), room)
        self._lengths[layer] = len(others)
        if len(of_context.tokens):
            computed = of_context.slots[of_context.changed]
            self._context[layer] = self._cached.entries(layer, of_context.tokens).with_computed(
                of_context.changed,
                entries.keys.index_select(0, computed),
                entries.values.index_select(0, computed),
            )
            values = entries.values.index_select(0, of_context.slots)
            self._mean_value[layer] = values.mean(0, keepdim=True)
        if len(of_context.tokens) > self._budget:
            self._choosers[layer] = self._rule.chooser(self._budget, entries.seen, of_context.slots)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        if self._is_near[layer]:
            return self._near.attend(layer, query, key, value, scaling)
        attend = partial(self._attend, layer, query, key, value, scaling)
        return on_one_thread(attend) if query.device.type == "cpu" else attend()

    @property
    def can_rewind(self) -> bool:
        return True

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        length, context, chooser = self._lengths[layer], self._context[layer], self._choosers[layer]
        self._keys[layer][length], self._values[layer][length] = key[0, :, 0], value[0, :, 0]
        self._lengths[layer] = length + 1
        parts = [(self._keys[layer][: length + 1], self._values[layer][: length + 1])]
        n_context, rest_logit, mask = 0, None, None
        if context is not None:
            if chooser is not None:
                of_heads = query[0, :, 0]
                logits = partial(self._logits, context, of_heads, scaling)
                chosen, rest_logit = chooser.choose(of_heads, logits)
                context = context.select(chosen)
            n_context = len(context)
            parts.insert(0, context.keys_and_values())
        if rest_logit is not None and self._method_attention is None:
            # A zero key has the logit 0 with every query; the mask adds the logit of the rest. All
            # logits are shifted by that logit, so that no large number is rounded to the dtype.
            mean_value = self._mean_value[layer]
            parts.append((torch.zeros_like(mean_value), mean_value))
            moved = rest_logit.to(query.dtype)
            mask = -moved[None, :, None, None].repeat(1, 1, 1, n_context + length + 2)
            mask[0, :, 0, -1] = rest_logit - moved.float()
        keys, values = (as_heads(torch.cat(side)) for side in zip(*parts, strict=True))
        if self._method_attention is None:
            return _attention(self._model, layer, query, keys, values, scaling, mask)
        is_context = torch.arange(keys.shape[2], device=keys.device) < n_context
        return self._method_attention(query, keys, values, scaling, None, is_context)

    def _logits(self, context: Entries, query: Tensor, scaling: float) -> Tensor:
        """(H, n) float32 of a query (H, D) with the context, as the layer scores it."""
        logits = context.logits(query).flatten(0, 1).mul_(scaling)
        if self._model is not None and (cap := self._model.score_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def on_one_thread(work: Callable[[], Tensor]) -> Tensor:
    """Run ``work`` in a thread that computes with one torch thread; return its result, or raise.

    It needs a separate thread, because `torch.set_num_threads` also sets the number for every
    thread that computes for the first time while the call is in force, and for good.
    """
    if torch.get_num_threads() == 1:
        return work()
    is_inference = torch.is_inference_mode_enabled()

    def run() -> Tensor:
        with torch.inference_mode(is_inference):
            return work()

    return _thread(os.getpid()).submit(run).result()


@lru_cache(maxsize=1)
def _thread(pid: int) -> ThreadPoolExecutor:
    """One thread for each process, because forks do not inherit threads."""
    n_threads = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix="samkv-one-thread")
    thread.submit(torch.get_num_threads).result()  # else its first operation would set the number
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(n_threads)  # for threads that start from now on
    return thread

"""The contract of what an answer goes on with: the KV entries that later tokens attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LayerEntries:
    """The KV entries that a pass leaves at a layer, in prompt order, and who computed some of them.

    keys, values: (S + room, G, D), rotated; the first S are the prompt's.
    is_context: (S,) bool, which of them are context tokens with a cache.
    context: (n,) context tokens that those are.
    context_slots, other_slots: where context tokens and all others lie among the S entries.
    changed: (d,) which of the context tokens do not stay as they are stored.
    queries: (H, R, D), rotated, of computed tokens that stay, and query_slots: (R,) theirs, CPU.
    """

    keys: Tensor
    values: Tensor
    n_entries: int
    is_context: Tensor
    context: Tensor
    context_slots: Tensor
    changed: Tensor
    other_slots: Tensor
    queries: Tensor
    query_slots: Tensor
    scaling: float


class WorkingCache(ABC):
    """KV entries of one answer, layer by layer.

    room: entries that a pass leaves free behind those that it hands over.
    prompt_bytes: bytes that the prompt's pass handed over, before any eviction.
    """

    room: int = 0
    prompt_bytes: int = 0

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes held, room not counted."""

    def attended(self, layer: int, of_chunks: Tensor) -> float:
        """Tokens of chunks that the first step attends to at a layer, mean over key-value heads.

        of_chunks: (S,) bool, CPU: which of the entries that the prompt's pass left are of chunks.
        """
        return int(of_chunks.sum())

    @abstractmethod
    def take(self, layer: int, entries: LayerEntries) -> None:
        """Keep what the prompt's pass leaves at a layer."""

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Add a token, key and value (1, G, 1, D), and attend: query and result (1, H, 1, D)."""


def as_heads(entries: Tensor) -> Tensor:
    """(S, heads, D) -> (1, heads, S, D), without a copy."""
    return entries.transpose(0, 1)[None]


def room_for(n_entries: int, like: Tensor) -> Tensor:
    """(n_entries, G, D) of undefined numbers, for entries such as ``like`` (S, G, D).

    The entries of a head lie side by side: a step then reads them in one run, which takes little
    more than half the time of reading every G-th row.
    """
    n_heads, size = like.shape[1:]
    return like.new_empty(n_heads, n_entries, size).transpose(0, 1)

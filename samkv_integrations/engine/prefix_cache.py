"""Prompts that were computed in full a moment ago: their beginnings, up to the last chunk.

The same chunks in the same order are the same prefix, whose KV entries are exact. Held in memory
only, and by one engine, so nothing crosses a namespace or outlives the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from samkv_integrations.errors import InvalidOption


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The KV entries of a prompt's first tokens, rotated: (L, P, G, D) each, as lists of layers."""

    token_ids: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(side.nbytes for side in (*self.keys, *self.values))

    def keys_and_values(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Entries (n, G, D) of tokens (n,), which are at their positions already."""
        keys, values = self.keys[layer], self.values[layer]
        return keys.index_select(0, tokens), values.index_select(0, tokens)

    def release(self, layer: int) -> None:
        """Nothing: the next prompt may begin so too."""


class PrefixCache:
    """The last few prefixes; the one that was used longest ago makes room. For many threads.

    max_bytes: of all together; 0 for none.

    Raises InvalidOption for another number.
    """

    def __init__(self, max_bytes: int) -> None:
        if type(max_bytes) is not int or max_bytes < 0:
            raise InvalidOption(
                f"prefix_bytes={max_bytes!r}; it must be a whole number of bytes, 0 for none"
            )
        self._max_bytes = max_bytes
        self._held: OrderedDict[tuple[str, tuple[int, ...]], Prefix] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, made_by: str, token_ids: Sequence[int]) -> Prefix | None:
        """The longest prefix of ``token_ids`` that is held, and shorter than all of them.

        made_by: what computed it, see `Fingerprint.computed_by`.
        """
        ids = tuple(token_ids)
        with self._lock:
            fits = [
                (maker, held)
                for maker, held in self._held
                if maker == made_by and len(held) < len(ids) and ids[: len(held)] == held
            ]
            if not fits:
                return None
            longest = max(fits, key=lambda each: len(each[1]))
            self._held.move_to_end(longest)
            return self._held[longest]

    def keep(
        self, made_by: str, token_ids: Sequence[int], keys: list[Tensor], values: list[Tensor]
    ) -> None:
        """Copy the entries of the first tokens, (S, G, D) a layer, if they fit into the budget."""
        ids, n_tokens = tuple(token_ids), len(token_ids)
        n_bytes = 2 * len(keys) * keys[0][:n_tokens].nbytes
        if not n_tokens or n_bytes > self._max_bytes:
            return
        prefix = Prefix(
            token_ids=ids,
            keys=tuple(side[:n_tokens].clone() for side in keys),
            values=tuple(side[:n_tokens].clone() for side in values),
        )
        with self._lock:
            self._held[made_by, ids] = prefix
            self._held.move_to_end((made_by, ids))
            while sum(held.n_bytes for held in self._held.values()) > self._max_bytes:
                self._held.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them, such as after a document was deleted, or the model changed."""
        with self._lock:
            self._held.clear()

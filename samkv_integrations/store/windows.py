"""Finds stored chunks in a prompt by keyed hashes of windows of token ids.

Of prompts and chunks alike every window of `WINDOW` token ids is hashed, and of every `PICKED_OF`
neighbouring windows the smallest hash is kept (winnowing; Schleimer, Wilkerson, Aiken 2003). So two
sequences that share a run of `MIN_RUN` ids share a kept hash, though only about every fifth window
is kept.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MIN_RUN = 16
"""Shortest run of token ids that a prompt takes from the cache of a chunk."""

WINDOW = 8
PICKED_OF = MIN_RUN - WINDOW + 1

MAX_PLACES = 4
"""Chunks that are tried for one window. If more share it, such as one of a licence text, the others
are found by windows of their own."""

Ids = NDArray[np.int32]
Window = tuple[str, int]
"""Key of a chunk, and the index of a window's first token in it."""

Found = tuple[Mapping[int, Sequence[Window]], Mapping[str, Ids]]
"""Places of windows by hash, and token ids of chunks by key."""


class Windows:
    """Hashes windows of token ids, keyed with a secret and names, such as that of a namespace.

    Multilinear hashing modulo 2^64 with secret multipliers: without the secret nobody can choose
    texts whose windows collide. A collision costs time only, because the ids are compared.
    """

    def __init__(self, secret: bytes, *names: str) -> None:
        numbers = []
        for salt in range(2):
            digest = hashlib.blake2b(key=secret, digest_size=64)
            for part in (b"windows", bytes([salt]), *map(str.encode, names)):
                digest.update(len(part).to_bytes(8, "little") + part)
            numbers.append(np.frombuffer(digest.digest(), dtype="<u8") | np.uint64(1))
        self._multipliers, (self._mix, self._last, *_) = numbers

    def pick(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hashes of the kept windows of ``ids`` (T,), and their first tokens, ascending."""
        if len(ids) < MIN_RUN:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        wide, n = ids.astype(np.uint64) + np.uint64(1), len(ids) - WINDOW + 1
        hashes = np.zeros(n, np.uint64)
        for first, multiplier in enumerate(self._multipliers):
            hashes += wide[first : first + n] * multiplier
        hashes = hashes ^ (hashes >> np.uint64(32))  # mixes the better, high bits in
        hashes *= self._mix
        hashes ^= hashes >> np.uint64(29)
        hashes *= self._last
        lowest = np.lib.stride_tricks.sliding_window_view(hashes, PICKED_OF).argmin(axis=1)
        at = np.unique(lowest + np.arange(len(lowest)))
        return hashes[at].view(np.int64), at

    def first_places(self, ids: Ids) -> dict[int, int]:
        """The kept hashes of a chunk, each with the first token of its first window."""
        hashes, at = self.pick(ids)
        return dict(zip(hashes[::-1].tolist(), at[::-1].tolist(), strict=True))


class ChunkIndex(Protocol):
    """Chunks by the windows of their token ids. windows: computes the hashes."""

    windows: Windows

    def find(self, hashes: Iterable[int]) -> Found:
        """At most `MAX_PLACES` places of each hash, and the token ids of their chunks."""


class MemoryIndex:
    """A `ChunkIndex` in memory. Safe to use from many threads."""

    def __init__(self, secret: bytes) -> None:
        self.windows = Windows(secret)
        self._lock = threading.Lock()
        self._ids: dict[str, Ids] = {}
        self._places: dict[int, dict[str, int]] = {}  # hash -> key -> where it occurs first

    def add(self, key: str, token_ids: Sequence[int]) -> None:
        """Add a chunk, unless the index has it."""
        ids = np.asarray(token_ids, np.int32)
        with self._lock:
            if key not in self._ids:
                self._ids[key] = ids
                for hashed, at in self.windows.first_places(ids).items():
                    self._places.setdefault(hashed, {})[key] = at

    def remove(self, key: str) -> None:
        """Remove a chunk, if the index has it."""
        with self._lock:
            ids = self._ids.pop(key, None)
            for hashed in () if ids is None else self.windows.first_places(ids):
                del self._places[hashed][key]
                if not self._places[hashed]:
                    del self._places[hashed]

    def find(self, hashes: Iterable[int]) -> Found:
        places: dict[int, Sequence[Window]] = {}
        ids: dict[str, Ids] = {}
        with self._lock:
            for hashed in hashes:
                if hashed in self._places:
                    places[hashed] = list(self._places[hashed].items())[:MAX_PLACES]
                    for key, _ in places[hashed]:
                        ids[key] = self._ids[key]
        return places, ids

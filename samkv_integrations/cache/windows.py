"""Stored chunks are found in a prompt by keyed hashes of windows of their token ids.

Both sides hash every window of `WINDOW` token ids, and keep the smallest hash of every `PICKED_OF`
neighbouring windows (winnowing; Schleimer, Wilkerson, Aiken 2003). So a run of `MIN_RUN` equal ids
has at least one kept hash in common, and only about every fifth window is kept.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MIN_RUN = 16
"""Fewest token ids in a row that a prompt takes from the cache of a chunk."""

WINDOW = 8
PICKED_OF = MIN_RUN - WINDOW + 1

MAX_PLACES = 4
"""Chunks that are tried for one window: of those that share a stretch, such as a licence, the
others are found by what is their own."""

Ids = NDArray[np.int32]
Place = tuple[str, int]
"""Key of a chunk, and the token of it that a window begins with."""

Found = tuple[Mapping[int, Sequence[Place]], Mapping[str, Ids]]
"""Places of windows by hash, and the token ids of their chunks by key."""


class Windows:
    """Hashes windows of token ids, keyed by a secret.

    Multilinear hashing modulo 2^64 with secret multipliers, so nobody without the secret can choose
    texts whose windows collide. A collision costs time only, because the ids are compared.

    names: what the hashes are of, such as a namespace and a fingerprint: others have other hashes.
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
        """Hashes of the kept windows of ``ids`` (T,), and where they begin, in ascending order.

        Nothing for fewer than `MIN_RUN` ids.
        """
        if len(ids) < MIN_RUN:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        wide, n = ids.astype(np.uint64) + np.uint64(1), len(ids) - WINDOW + 1
        hashes = np.zeros(n, np.uint64)
        for first, multiplier in enumerate(self._multipliers):
            hashes += wide[first : first + n] * multiplier
        hashes = hashes ^ (hashes >> np.uint64(32))  # the high bits of such sums are the good ones
        hashes *= self._mix
        hashes ^= hashes >> np.uint64(29)
        hashes *= self._last
        lowest = np.lib.stride_tricks.sliding_window_view(hashes, PICKED_OF).argmin(axis=1)
        at = np.unique(lowest + np.arange(len(lowest)))
        return hashes[at].view(np.int64), at

    def first_places(self, ids: Ids) -> dict[int, int]:
        """The kept hashes of a chunk, and where each occurs first."""
        hashes, at = self.pick(ids)
        return dict(zip(hashes[::-1].tolist(), at[::-1].tolist(), strict=True))


class ChunkIndex(Protocol):
    """Knows chunks by the windows of their token ids. windows: what its hashes are made with."""

    windows: Windows

    def find(self, hashes: Iterable[int]) -> Found:
        """Where windows with these hashes are in chunks, and the token ids of these chunks.

        `MAX_PLACES` of each hash at most; a hash that is in no chunk is left out.
        """


class MemoryIndex:
    """A `ChunkIndex` in memory, with a secret of its own. Safe to use from many threads."""

    def __init__(self, secret: bytes) -> None:
        self.windows = Windows(secret)
        self._lock = threading.Lock()
        self._ids: dict[str, Ids] = {}
        self._places: dict[int, dict[str, int]] = {}  # hash -> key -> where it occurs first

    def add(self, key: str, token_ids: Sequence[int]) -> None:
        """Know a chunk; again is no mistake."""
        ids = np.asarray(token_ids, np.int32)
        with self._lock:
            if key not in self._ids:
                self._ids[key] = ids
                for hashed, at in self.windows.first_places(ids).items():
                    self._places.setdefault(hashed, {})[key] = at

    def remove(self, key: str) -> None:
        """Know a chunk no longer, if it was known."""
        with self._lock:
            ids = self._ids.pop(key, None)
            for hashed in () if ids is None else self.windows.first_places(ids):
                del self._places[hashed][key]
                if not self._places[hashed]:
                    del self._places[hashed]

    def find(self, hashes: Iterable[int]) -> Found:
        places: dict[int, Sequence[Place]] = {}
        ids: dict[str, Ids] = {}
        with self._lock:
            for hashed in hashes:
                if hashed in self._places:
                    places[hashed] = list(self._places[hashed].items())[:MAX_PLACES]
                    for key, _ in places[hashed]:
                        ids[key] = self._ids[key]
        return places, ids

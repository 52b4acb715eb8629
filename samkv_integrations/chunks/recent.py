"""What an engine remembers of chunks for a while: keys, and caches that were released."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from samkv_integrations.store.chunk import ChunkCache, Fingerprint

MAX_RECENT = 2**16
"""Keys that `RecentKeys` remembers, about 10 MB: more than one ingest adds at once."""


class RecentKeys:
    """The latest `MAX_RECENT` keys of chunks, each with its seconds of work. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Iterable[str], seconds: float = 0.0) -> None:
        """Remember the keys of chunks that took ``seconds`` each."""
        with self._lock:
            for key in keys:
                self._seconds[key] = seconds
                self._seconds.move_to_end(key)
            while len(self._seconds) > MAX_RECENT:
                self._seconds.popitem(last=False)

    def take(self, key: str) -> float | None:
        """Remove a key and return its seconds; None if it is unknown."""
        with self._lock:
            return self._seconds.pop(key, None)


RELEASED_S, RELEASED_BYTES = 60.0, 2**28
"""Longest time for which `ReleasedCaches` keeps caches, and most bytes of them."""


class ReleasedCaches:
    """Caches whose records were deleted within the last minute, in memory. Thread-safe.

    Indexers delete the chunks of a source and add most of them again (LangChain's ``index`` with a
    batch that is smaller than a source). Only a text that is added again finds its cache here, no
    prompt does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: dict[str, ChunkCache] = {}
        self._timer: threading.Timer | None = None
        self.n_cleared = 0

    def add(self, cache: ChunkCache, n_cleared: int) -> bool:
        """Keep a cache for at most a minute, if there is room; returns whether it is kept.

        n_cleared: the attribute before the cache was read. If it has changed, nothing is kept.
        """
        with self._lock:
            if n_cleared != self.n_cleared:
                return False
            kept = [*self._caches.values(), cache]
            if sum(each.shape.n_bytes for each in kept) > RELEASED_BYTES:
                return False
            self._caches[cache.key] = cache
            if self._timer is None:
                self._timer = threading.Timer(RELEASED_S, self.clear)
                self._timer.daemon = True
                self._timer.start()
            return True

    def take(self, key: str, made_by: Fingerprint) -> ChunkCache | None:
        """Remove a cache and return it; None if there is none of this fingerprint."""
        with self._lock:
            cache = self._caches.pop(key, None)
        return cache if cache is not None and cache.fingerprint == made_by else None

    def clear(self) -> None:
        """Drop all caches."""
        with self._lock:
            self._caches, timer, self._timer = {}, self._timer, None
            self.n_cleared += 1
        if timer is not None:
            timer.cancel()

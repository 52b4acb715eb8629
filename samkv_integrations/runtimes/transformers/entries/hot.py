"""Hot chunks: caches that were read and verified, in memory, so that questions read no file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samkv_integrations.errors import CacheMiss
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    cache_shape,
    key_range,
)
from samkv_integrations.store.base import ChunkReader, Store, StoredChunk
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.store.memory import MemoryChunk

Place = tuple[str, str]
"""Digest of the fingerprint, and key, of a chunk."""

Copied = Sequence[torch.cuda.Event]
"""Of each layer the event after which it is on the GPU; empty if all layers are."""

_MOST_READERS = 16
_NO_ENTRIES = np.empty((0, 0, 0), np.uint8)


@lru_cache(2)
def readers(pid: int, purpose: str) -> ThreadPoolExecutor:
    """Threads that read for questions. By process, as a fork does not inherit threads."""
    n_threads = min(_MOST_READERS, os.cpu_count() or 1)
    return ThreadPoolExecutor(n_threads, thread_name_prefix=f"samkv-{purpose}")


@cache
def copying(gpu: torch.device) -> torch.cuda.Stream:
    """The stream that copies to a GPU, beside the one that computes there."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True, eq=False)
class HotCache:
    """A cache in memory.

    stored: closed; it tells whether the cache is current. cache: without entries.
    entries: (L, T, E) uint8; key_range: (L, N, 2, G, D) float16. Both are on the host, or both on
        the device.
    copied: a stream waits for a layer's event before it reads that layer, or the key range.
    """

    stored: StoredChunk
    cache: ChunkCache
    entries: Tensor
    key_range: Tensor
    copied: Copied = ()


class HotChunk(MemoryChunk):
    """A chunk cache out of `HotChunks`. Nothing is read for it."""

    def __init__(self, hot: HotCache, fingerprint: Fingerprint) -> None:
        super().__init__(hot.cache, fingerprint)
        self.bytes_read, self.hot = 0, hot

    def chunk(self, entries: NDArray[np.uint8] | None = None) -> ChunkCache:
        return replace(self.hot.cache, entries=self.hot.entries.cpu().numpy())


class HotChunks(ChunkReader):
    """Caches of a store in memory, packed as stored; the least recently used make room.

    Before a cache is used, its file is opened, and must be the one that was read, unchanged. So a
    chunk that any process has deleted, evicted or replaced is a miss, as it is without this class.
    Memory of deleted chunks is freed by `sweep`. Thread-safe.

    Args:
        store: opens the other caches.
        max_bytes: of all caches together; 0 for none.
        devices: of the model's layers. With a GPU among them memory of the host is pinned. If all
            layers are on one GPU, `bring` moves caches there that are used a second time, up to
            ``max_bytes`` of them, and they move back when they make room.
    """

    def __init__(
        self, store: Store, max_bytes: int = 0, devices: Collection[torch.device] = ()
    ) -> None:
        super().__init__(store, cache_shape)
        self.max_bytes = max_bytes
        on_gpu = {device for device in devices if device.type == "cuda"}
        self._is_pinned = bool(on_gpu) and torch.cuda.is_available()
        self._gpu = on_gpu.pop() if len(on_gpu) == len(set(devices)) == 1 else None
        self._held: OrderedDict[Place, HotCache] = OrderedDict()  # the most recently used one last
        self._coming: dict[tuple[int, Place], Future[None]] = {}  # by process: a fork has none
        self._seen_deletion: int | None = None
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Of the caches that are held, wherever they are."""
        return sum(hot.stored.size for hot in [*self._held.values()])

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """As `Store.open`, which is asked for what is not held; waits while `warm` reads it."""
        place = (fingerprint.digest, key)
        coming = self._coming.get((os.getpid(), place))
        if coming is not None and not coming.cancel():  # what has not begun is read here
            wait([coming])
        found = self._held.get(place)
        if found is not None and not found.stored.is_current():
            self.sweep()
            found = None
        if found is None:
            return super().open(key, fingerprint, token_ids)
        if token_ids is not None and found.cache.token_ids.tolist() != list(token_ids):
            return super().open(key, fingerprint, token_ids)  # which tells what is wrong
        hot = found
        if hot.copied and hot.copied[-1].query():  # type: ignore[no-untyped-call]
            hot = replace(hot, copied=())
        with self._lock:
            if self._held.get(place) is found:  # else it was cleared, and goes with this question
                self._held[place] = hot
                self._held.move_to_end(place)
        return HotChunk(hot, fingerprint)

    def bring(self, chunks: Sequence[StoredChunk]) -> None:
        """Begin to copy the chunks of a question that are in the host's memory to the GPU.

        A stream of its own copies a layer of all chunks after the other, beside what the GPU
        computes, see `HotChunk.copied`. The host waits for nothing.
        """
        gpu, hot = self._gpu, [each for each in dict.fromkeys(chunks) if isinstance(each, HotChunk)]
        on_host = [chunk for chunk in hot if chunk.hot.entries.device != gpu]
        if gpu is None or not on_host:
            return
        copies, copied = copying(gpu), list[torch.cuda.Event]()
        moving: list[tuple[HotChunk, HotCache]] = []
        with self._lock:
            with suppress(RuntimeError):  # no memory is left: the others stay where they are
                for chunk in on_host:
                    here = chunk.hot
                    held = self._held.get((chunk.fingerprint.digest, chunk.key))
                    if held is not None and held.entries.device == gpu:
                        if held.stored is here.stored:  # moved by another question, not read again
                            chunk.hot = held
                            continue
                    sides = here.entries, here.key_range
                    entries, key_range = (torch.empty_like(side, device=gpu) for side in sides)
                    for side in (entries, key_range):
                        side.record_stream(copies)  # so that it is freed after the copies only
                    there = replace(here, entries=entries, key_range=key_range, copied=copied)
                    moving.append((chunk, there))
            # for what used this memory, and for caches that were moved to the host
            copies.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(copies):
                for chunk, there in moving:
                    there.key_range.copy_(chunk.hot.key_range, non_blocking=True)
                layers = [
                    zip(there.entries, chunk.hot.entries, strict=True) for chunk, there in moving
                ]
                for layer in zip(*layers, strict=True):
                    for of_gpu, of_host in layer:
                        of_gpu.copy_(of_host, non_blocking=True)
                    copied.append(copies.record_event())
            for chunk, there in moving:
                place, here = (chunk.fingerprint.digest, chunk.key), chunk.hot
                held = self._held.get(place)
                if held is not None and held.entries is here.entries:  # else as in `open`
                    self._hold(place, there)
                chunk.hot = there

    def warm(self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint) -> None:
        """Begin to read chunks, which a question will use, in threads.

        Those that do not fit into ``max_bytes`` together are left to the question, as are chunks
        that have no intact file.
        """
        free, pid = self.max_bytes, os.getpid()
        with self._lock, suppress(RuntimeError):  # no more threads can be started
            for chunk in chunks if free else ():
                place = (fingerprint.digest, chunk.key)
                free -= cache_shape(fingerprint, len(chunk.token_ids)).n_bytes
                if free < 0:
                    break
                if place in self._held:
                    self._held.move_to_end(place)
                elif (pid, place) not in self._coming:
                    coming = readers(pid, "warm").submit(self._read, place, fingerprint)
                    self._coming[pid, place] = coming
                    coming.add_done_callback(partial(self._has_come, pid, place))

    @property
    def is_warming(self) -> bool:
        """Whether something that `warm` was given is still to be read."""
        return bool(self._coming)

    def _has_come(self, pid: int, place: Place, _: Future[None]) -> None:
        self._coming.pop((pid, place), None)

    def _read(self, place: Place, fingerprint: Fingerprint) -> None:
        with suppress(CacheMiss), super().open(place[1], fingerprint) as stored:
            if (entries := self.room_for(stored)) is not None:
                stored.read_layers(0, [*entries.numpy()])
                self.keep(stored, entries)

    def fits(self, stored: StoredChunk) -> bool:
        """Whether there can be room for a chunk: it has a file, of at most ``max_bytes``."""
        return 0 < stored.size <= self.max_bytes

    def room_for(self, stored: StoredChunk) -> Tensor | None:
        """(L, T, E) for the entries of a chunk that `keep` shall hold; None if it cannot."""
        if not self.fits(stored):
            return None
        with suppress(RuntimeError):  # no memory is left
            shape = cache_shape(stored.fingerprint, stored.n_tokens)
            return self._empty(shape.entries, torch.uint8)
        return None

    def keep(self, stored: StoredChunk, entries: Tensor) -> None:
        """Hold a chunk of which all entries were read, and verified, into a tensor of `room_for`.

        A chunk whose file was deleted or changed meanwhile is not held.
        """
        # what this question does not need may be damaged, and memory may be short
        with suppress(CacheMiss, RuntimeError):
            cache = replace(stored.chunk(entries.numpy()), entries=_NO_ENTRIES)
            ranges = key_range(cache)
            ranges = self._empty(ranges.shape, ranges.dtype).copy_(ranges)
            hot = HotCache(stored=stored, cache=cache, entries=entries, key_range=ranges)
            with self._lock:
                if stored.is_current():
                    self._hold((stored.fingerprint.digest, stored.key), hot)

    def _hold(self, place: Place, hot: HotCache) -> None:
        """Hold a cache as the most recently used one, and make room for it."""
        self._held[place] = hot
        self._held.move_to_end(place)
        free = {"cpu": self.max_bytes, "cuda": self.max_bytes}
        for place, hot in reversed([*self._held.items()]):
            was = where = hot.entries.device.type
            if free[where] < hot.stored.size:
                where = "cpu"
            if free[where] < hot.stored.size:
                del self._held[place]
                continue
            free[where] -= hot.stored.size
            if where != was:
                try:
                    self._held[place] = self._on_host(hot)
                except RuntimeError:  # no memory is left
                    del self._held[place]

    def _on_host(self, hot: HotCache) -> HotCache:
        """A cache in the host's memory. The host waits for no copy, and does not read it."""
        if hot.copied:
            torch.cuda.current_stream(hot.entries.device).wait_event(hot.copied[-1])

        def moved(tensor: Tensor) -> Tensor:
            return self._empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

        entries, key_range = moved(hot.entries), moved(hot.key_range)
        return replace(hot, entries=entries, key_range=key_range, copied=())

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the host."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)

    def follow(self, deletion: int) -> None:
        """`sweep` if something was deleted since the last call. deletion: `Index.deletions`."""
        if deletion != self._seen_deletion:
            self._seen_deletion = deletion
            self.sweep()

    def sweep(self) -> None:
        """Free all caches whose file was deleted, evicted or replaced."""
        with self._lock:
            for place, hot in [*self._held.items()]:
                if not hot.stored.is_current():
                    del self._held[place]

    def clear(self) -> None:
        """Free all caches; questions hold them again."""
        with self._lock:
            self._held.clear()

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
from samkv_integrations.runtimes.transformers.entries.cache_arrays import cache_shape, key_range
from samkv_integrations.store.base import ChunkReader, Store, StoredChunk
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.store.memory import MemoryChunk

Place = tuple[str, str]
"""Digest of the fingerprint, and key, of a chunk."""

Copied = Sequence[torch.cuda.Event]
"""For each layer the event after which it is on the GPU; empty once all layers are there."""

_MOST_READERS = 16
_NO_ENTRIES = np.empty((0, 0, 0), np.uint8)


@lru_cache(2)
def readers(pid: int, purpose: str) -> ThreadPoolExecutor:
    """Threads that read caches for questions; each process has its own, as forks inherit none."""
    n_threads = min(_MOST_READERS, os.cpu_count() or 1)
    return ThreadPoolExecutor(n_threads, thread_name_prefix=f"samkv-{purpose}")


@cache
def copying(gpu: torch.device) -> torch.cuda.Stream:
    """The stream that copies to a GPU while another stream computes there."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True, eq=False)
class HotCache:
    """A cache in memory.

    stored: the closed file, which tells whether the cache is current. cache: all but the entries.
    entries: (L, T, E) uint8; key_range: (L, N, 2, G, D) float16. Both are on the host, or both on
        the device.
    copied: a stream must wait for a layer's event before it reads that layer, or the key range.
    """

    stored: StoredChunk
    cache: ChunkCache
    entries: Tensor
    key_range: Tensor
    copied: Copied = ()


class HotChunk(MemoryChunk):
    """A chunk cache that `HotChunks` keeps in memory; opening it reads no file."""

    def __init__(self, hot: HotCache, fingerprint: Fingerprint) -> None:
        super().__init__(hot.cache, fingerprint)
        self.bytes_read, self.hot = 0, hot

    def chunk(self, entries: NDArray[np.uint8] | None = None) -> ChunkCache:
        return replace(self.hot.cache, entries=self.hot.entries.cpu().numpy())


class HotChunks(ChunkReader):
    """Caches of a store in memory, packed as stored; the least recently used make room.

    Before each use the file of the cache is opened: it must be the file that was read, unchanged.
    So a chunk that any process has deleted, evicted or replaced is a miss, as without this class.
    Memory of deleted chunks is freed by `sweep`. Thread-safe.

    Args:
        store: opens all other caches.
        max_bytes: most bytes of all hot chunks together; 0 keeps none.
        devices: those of the model's layers. With a GPU among them, host memory is pinned. If all
            layers are on one GPU, `bring` moves a cache there at its second use, up to
            ``max_bytes`` of caches. A cache that makes room moves back to the host.
    """

    def __init__(
        self, store: Store, max_bytes: int = 0, devices: Collection[torch.device] = ()
    ) -> None:
        super().__init__(store, cache_shape)
        self.max_bytes = max_bytes
        on_gpu = {device for device in devices if device.type == "cuda"}
        self._is_pinned = bool(on_gpu) and torch.cuda.is_available()
        self._gpu = on_gpu.pop() if len(on_gpu) == len(set(devices)) == 1 else None
        self._hot: OrderedDict[Place, HotCache] = OrderedDict()  # the most recently used one last
        self._reads: dict[tuple[int, Place], Future[None]] = {}  # by process: a fork has none
        self._seen_deletion: int | None = None
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes of all hot chunks, on the host and on the GPU."""
        return sum(hot.stored.size for hot in [*self._hot.values()])

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """As `Store.open`; only a chunk that is not hot is read. Waits for a read of `warm`."""
        place = (fingerprint.digest, key)
        read = self._reads.get((os.getpid(), place))
        if read is not None and not read.cancel():  # a read that has not begun is done here
            wait([read])
        found = self._hot.get(place)
        if found is not None and not found.stored.is_current():
            self.sweep()
            found = None
        if found is None:
            return super().open(key, fingerprint, token_ids)
        if token_ids is not None and found.cache.token_ids.tolist() != list(token_ids):
            return super().open(key, fingerprint, token_ids)  # which raises the reason
        hot = found
        if hot.copied and hot.copied[-1].query():  # type: ignore[no-untyped-call]
            hot = replace(hot, copied=())
        with self._lock:
            if self._hot.get(place) is found:  # else freed after this question
                self._hot[place] = hot
                self._hot.move_to_end(place)
        return HotChunk(hot, fingerprint)

    def bring(self, chunks: Sequence[StoredChunk]) -> None:
        """Begin to copy the chunks of a question that are in the host's memory to the GPU.

        A separate stream copies layer by layer, one layer of all chunks at a time, while the GPU
        computes (see `HotCache.copied`). The host waits for nothing.
        """
        gpu, hot = self._gpu, [each for each in dict.fromkeys(chunks) if isinstance(each, HotChunk)]
        on_host = [chunk for chunk in hot if chunk.hot.entries.device != gpu]
        if gpu is None or not on_host:
            return
        copies, copied = copying(gpu), list[torch.cuda.Event]()
        moving: list[tuple[HotChunk, HotCache]] = []
        with self._lock:
            with suppress(RuntimeError):  # no memory left: the others stay on the host
                for chunk in on_host:
                    here = chunk.hot
                    kept = self._hot.get((chunk.fingerprint.digest, chunk.key))
                    if kept is not None and kept.entries.device == gpu:
                        if kept.stored is here.stored:  # another question moved it
                            chunk.hot = kept
                            continue
                    sides = here.entries, here.key_range
                    entries, key_range = (torch.empty_like(side, device=gpu) for side in sides)
                    for side in (entries, key_range):
                        side.record_stream(copies)  # freed after the copies only
                    there = replace(here, entries=entries, key_range=key_range, copied=copied)
                    moving.append((chunk, there))
            # earlier work of this stream may use this memory, or move caches to the host
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
                kept = self._hot.get(place)
                if kept is not None and kept.entries is here.entries:  # else as in `open`
                    self._keep(place, there)
                chunk.hot = there

    def warm(self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint) -> None:
        """Begin to read, in threads, the chunks that a question will use.

        The question itself reads the chunks that exceed ``max_bytes``, and finds out which chunks
        have no intact file.
        """
        free, pid = self.max_bytes, os.getpid()
        with self._lock, suppress(RuntimeError):  # no more threads can be started
            for chunk in chunks if free else ():
                place = (fingerprint.digest, chunk.key)
                free -= cache_shape(fingerprint, len(chunk.token_ids)).n_bytes
                if free < 0:
                    break
                if place in self._hot:
                    self._hot.move_to_end(place)
                elif (pid, place) not in self._reads:
                    read = readers(pid, "warm").submit(self._read, place, fingerprint)
                    self._reads[pid, place] = read
                    read.add_done_callback(partial(self._read_ended, pid, place))

    @property
    def is_warming(self) -> bool:
        """Whether a read that `warm` began has not ended."""
        return bool(self._reads)

    def _read_ended(self, pid: int, place: Place, _: Future[None]) -> None:
        self._reads.pop((pid, place), None)

    def _read(self, place: Place, fingerprint: Fingerprint) -> None:
        with suppress(CacheMiss), super().open(place[1], fingerprint) as stored:
            if (entries := self.room_for(stored)) is not None:
                stored.read_layers(0, [*entries.numpy()])
                self.keep(stored, entries)

    def fits(self, stored: StoredChunk) -> bool:
        """Whether the chunk can be hot: it has a file, of at most ``max_bytes``."""
        return 0 < stored.size <= self.max_bytes

    def room_for(self, stored: StoredChunk) -> Tensor | None:
        """(L, T, E) memory for the entries of a chunk, for `keep`; None if there is no room."""
        if not self.fits(stored):
            return None
        with suppress(RuntimeError):  # no memory is left
            shape = cache_shape(stored.fingerprint, stored.n_tokens)
            return self._empty(shape.entries, torch.uint8)
        return None

    def keep(self, stored: StoredChunk, entries: Tensor) -> None:
        """Keep a chunk whose entries were all read into a tensor of `room_for`, and verified.

        A chunk whose file was deleted or changed meanwhile is not kept.
        """
        # parts that this question does not need may be damaged, and memory may be short
        with suppress(CacheMiss, RuntimeError):
            cache = replace(stored.chunk(entries.numpy()), entries=_NO_ENTRIES)
            ranges = key_range(cache)
            ranges = self._empty(ranges.shape, ranges.dtype).copy_(ranges)
            hot = HotCache(stored=stored, cache=cache, entries=entries, key_range=ranges)
            with self._lock:
                if stored.is_current():
                    self._keep((stored.fingerprint.digest, stored.key), hot)

    def _keep(self, place: Place, hot: HotCache) -> None:
        """Keep a cache as the most recently used one; the least recently used make room."""
        self._hot[place] = hot
        self._hot.move_to_end(place)
        free = {"cpu": self.max_bytes, "cuda": self.max_bytes}
        for place, hot in reversed([*self._hot.items()]):
            was = where = hot.entries.device.type
            if free[where] < hot.stored.size:
                where = "cpu"
            if free[where] < hot.stored.size:
                del self._hot[place]
                continue
            free[where] -= hot.stored.size
            if where != was:
                try:
                    self._hot[place] = self._on_host(hot)
                except RuntimeError:  # no memory is left
                    del self._hot[place]

    def _on_host(self, hot: HotCache) -> HotCache:
        """The cache in host memory. The host neither waits for the copy nor reads it."""
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
            for place, hot in [*self._hot.items()]:
                if not hot.stored.is_current():
                    del self._hot[place]

    def clear(self) -> None:
        """Free all caches. Later questions keep them again."""
        with self._lock:
            self._hot.clear()

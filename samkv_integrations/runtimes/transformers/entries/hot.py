"""Hot chunks: caches that were read and verified, in memory, so that questions read no file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import ClassVar, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor

from samkv_integrations.chunks.chunk import ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.errors import CacheMiss
from samkv_integrations.store.base import MemoryChunk, Store, StoredChunk
from samkv_integrations.store.chunk_file import ChunkFile, FileLayout
from samkv_integrations.store.index import Place

Copied = Sequence[torch.cuda.Event]
"""Of each layer the event after which it is on the GPU; empty if all layers are."""

_MOST_READERS = 16


@lru_cache(2)
def readers(pid: int, purpose: str) -> ThreadPoolExecutor:
    """Threads that read for questions. By process, as a fork does not inherit threads."""
    n_threads = min(_MOST_READERS, os.cpu_count() or 1)
    return ThreadPoolExecutor(n_threads, thread_name_prefix=f"samkv-{purpose}")


@cache
def copying(gpu: torch.device) -> torch.cuda.Stream:
    """The stream that copies to a GPU, beside the one that computes there."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


class HotChunk(MemoryChunk):
    """A chunk cache out of `HotChunks`. Nothing is read for it.

    entries: (L, T, E) uint8, on the host or the device.
    copied: a stream waits for a layer's event before it reads that layer, or the key ranges.
    """

    def __init__(self, chunk: ChunkCache, fingerprint: Fingerprint, copied: Copied = ()) -> None:
        super().__init__(chunk, fingerprint)
        self.bytes_read = 0
        self.move(chunk, copied)

    def move(self, chunk: ChunkCache, copied: Copied) -> None:
        """Take the same cache elsewhere."""
        self._chunk, self.entries, self.copied = chunk, chunk.entries, copied


class HotChunks:
    """Caches of chunk files in memory, packed as stored; the least recently used make room.

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

    _all: ClassVar[WeakSet[HotChunks]] = WeakSet()

    def __init__(
        self, store: Store, max_bytes: int = 0, devices: Collection[torch.device] = ()
    ) -> None:
        self.max_bytes, self._store = max_bytes, store
        on_gpu = {device for device in devices if device.type == "cuda"}
        self._is_pinned = bool(on_gpu) and torch.cuda.is_available()
        self._gpu = on_gpu.pop() if len(on_gpu) == len(set(devices)) == 1 else None
        # the most recently used one last; the file, which is closed, tells whether it is current
        self._held: OrderedDict[Place, tuple[ChunkFile, ChunkCache, Copied]] = OrderedDict()
        self._coming: dict[tuple[int, Place], Future[None]] = {}  # by process: a fork has none
        self._seen_deletion: int | None = None
        self._lock = threading.Lock()
        HotChunks._all.add(self)

    @property
    def n_bytes(self) -> int:
        """Of the caches that are held, wherever they are."""
        return sum(file.layout.size for file, *_ in [*self._held.values()])

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """As `Store.open`, which is asked for what is not held; waits while `warm` reads it."""
        place = (fingerprint.digest, key)
        coming = self._coming.get((os.getpid(), place))
        if coming is not None and not coming.cancel():  # what has not begun is read here
            wait([coming])
        found = self._held.get(place)
        if found is not None and not found[0].is_current():
            self.sweep()
            found = None
        if found is None:
            return self._store.open(key, fingerprint, token_ids)
        file, cache, copied = found
        if token_ids is not None and cache.token_ids.tolist() != list(token_ids):
            return self._store.open(key, fingerprint, token_ids)  # which tells what is wrong
        if copied and copied[-1].query():  # type: ignore[no-untyped-call]
            copied = ()
        with self._lock:
            if self._held.get(place) is found:  # else it was cleared, and goes with this question
                self._held[place] = file, cache, copied
                self._held.move_to_end(place)
        return HotChunk(cache, fingerprint, copied)

    def bring(self, chunks: Sequence[StoredChunk]) -> None:
        """Begin to copy the chunks of a question that are in the host's memory to the GPU.

        A stream of its own copies a layer of all chunks after the other, beside what the GPU
        computes, see `HotChunk.copied`. The host waits for nothing.
        """
        gpu, hot = self._gpu, [each for each in dict.fromkeys(chunks) if isinstance(each, HotChunk)]
        on_host = [chunk for chunk in hot if chunk.entries.device != gpu]
        if gpu is None or not on_host:
            return
        copies, copied = copying(gpu), list[torch.cuda.Event]()
        moving: list[tuple[HotChunk, ChunkCache]] = []
        with self._lock:
            with suppress(RuntimeError):  # no memory is left: the others stay where they are
                for chunk in on_host:
                    held = self._held.get((chunk.fingerprint.digest, chunk.key))
                    if held is not None and held[1].entries.device == gpu:
                        if held[1].token_ids is chunk.chunk().token_ids:  # moved, not read again
                            chunk.move(*held[1:])  # by another question, meanwhile
                            continue
                    sides = chunk.entries, chunk.key_range()
                    entries, key_range = (torch.empty_like(side, device=gpu) for side in sides)
                    for side in (entries, key_range):
                        side.record_stream(copies)  # so that it is freed after the copies only
                    cache = replace(chunk.chunk(), entries=entries, key_range=key_range)
                    moving.append((chunk, cache))
            # for what used this memory, and for caches that were moved to the host
            copies.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(copies):
                for chunk, cache in moving:
                    cache.key_range.copy_(chunk.key_range(), non_blocking=True)
                layers = [zip(cache.entries, chunk.entries, strict=True) for chunk, cache in moving]
                for layer in zip(*layers, strict=True):
                    for there, here in layer:
                        there.copy_(here, non_blocking=True)
                    copied.append(copies.record_event())
            for chunk, cache in moving:
                place = chunk.fingerprint.digest, chunk.key
                held = self._held.get(place)
                if held is not None and held[1] is chunk.chunk():  # else as in `open`
                    self._hold(place, held[0], cache, copied)
                chunk.move(cache, copied)

    def warm(self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint) -> None:
        """Begin to read chunks, which a question will use, in threads.

        Those that do not fit into ``max_bytes`` together are left to the question, as are chunks
        that have no intact file.
        """
        free, pid = self.max_bytes, os.getpid()
        with self._lock, suppress(RuntimeError):  # no more threads can be started
            for chunk in chunks if free else ():
                place = (fingerprint.digest, chunk.key)
                free -= FileLayout.of(
                    fingerprint, len(chunk.token_ids), self._store.namespace, chunk.text
                ).size
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
        with suppress(CacheMiss), self._store.open(place[1], fingerprint) as stored:
            if (entries := self.room_for(stored)) is not None:
                stored.read_layers(0, [*entries])
                self.keep(stored, entries)

    def fits(self, stored: StoredChunk) -> TypeGuard[ChunkFile]:
        """Whether there can be room for a chunk: it has a file, of at most ``max_bytes``."""
        return isinstance(stored, ChunkFile) and stored.layout.size <= self.max_bytes

    def room_for(self, stored: StoredChunk) -> Tensor | None:
        """(L, T, E) for the entries of a chunk that `keep` shall hold; None if it cannot."""
        if not self.fits(stored):
            return None
        with suppress(RuntimeError):  # no memory is left
            return self._empty(stored.layout.tensors["entries"].shape, torch.uint8)
        return None

    def keep(self, stored: StoredChunk, entries: Tensor) -> None:
        """Hold a chunk of which all entries were read, and verified, into a tensor of `room_for`.

        A chunk whose file was deleted or changed meanwhile is not held.
        """
        assert isinstance(stored, ChunkFile)
        # what this question does not need may be damaged, and memory may be short
        with suppress(CacheMiss, RuntimeError):
            cache = stored.chunk(entries)
            ranges = self._empty(cache.key_range.shape, torch.float16).copy_(cache.key_range)
            cache = replace(cache, key_range=ranges)
            with self._lock:
                if stored.is_current():
                    self._hold((stored.fingerprint.digest, stored.key), stored, cache, ())

    def _hold(self, place: Place, file: ChunkFile, cache: ChunkCache, copied: Copied) -> None:
        """Hold a cache as the most recently used one, and make room for it."""
        self._held[place] = file, cache, copied
        self._held.move_to_end(place)
        free = {"cpu": self.max_bytes, "cuda": self.max_bytes}
        for place, (file, cache, copied) in reversed([*self._held.items()]):
            was = where = cache.entries.device.type
            if free[where] < file.layout.size:
                where = "cpu"
            if free[where] < file.layout.size:
                del self._held[place]
                continue
            free[where] -= file.layout.size
            if where != was:
                try:
                    self._held[place] = file, self._on_host(cache, copied), ()
                except RuntimeError:  # no memory is left
                    del self._held[place]

    def _on_host(self, cache: ChunkCache, copied: Copied) -> ChunkCache:
        """A cache in the host's memory. The host waits for no copy, and does not read it."""
        if copied:
            torch.cuda.current_stream(cache.entries.device).wait_event(copied[-1])

        def moved(tensor: Tensor) -> Tensor:
            return self._empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

        return replace(cache, entries=moved(cache.entries), key_range=moved(cache.key_range))

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
            for place, (file, *_) in [*self._held.items()]:
                if not file.is_current():
                    del self._held[place]

    def clear(self) -> None:
        """Free all caches; questions hold them again."""
        with self._lock:
            self._held.clear()

    @classmethod
    def clear_all(cls) -> None:
        """Free the caches of all engines of this process."""
        for each in [*cls._all]:
            each.clear()

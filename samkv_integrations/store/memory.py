"""Chunk caches in this process's memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import SECRET_BYTES, CacheArray, ChunkCache, Fingerprint
from samkv_integrations.store.index import Entry, Index, Place
from samkv_integrations.store.indexed import IndexedStore


class MemoryChunk(StoredChunk):
    """An opened chunk cache in memory. Token ids and entries count as bytes read."""

    def __init__(self, chunk: ChunkCache, fingerprint: Fingerprint) -> None:
        self.key, self.fingerprint = chunk.key, fingerprint
        self.n_tokens, self.blocks = chunk.n_tokens, chunk.blocks
        self.token_ids, self.shape = chunk.token_ids, chunk.shape
        self.size, self.bytes_read = 0, chunk.token_ids.nbytes
        self._chunk = chunk

    def text(self) -> str:
        return self._chunk.text

    def array(self, name: str) -> CacheArray:
        return self._chunk.array(name)

    def read_layers(self, first: int, out: Sequence[NDArray[np.uint8]]) -> None:
        entries = self.chunk().entries[first : first + len(out)]
        assert first >= 0 and len(out) == len(entries)
        for layer, found in zip(out, entries, strict=True):
            assert (layer.dtype, layer.shape) == (found.dtype, found.shape)
            assert layer.flags.c_contiguous
            layer[...] = found
        self.bytes_read += entries.nbytes

    def read_blocks(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        assert layer >= 0 and min(blocks, default=0) >= 0
        tokens = [token for block in blocks for token in range(*self.blocks.span(block))]
        found = self.chunk().entries[layer][tokens]
        assert (out.dtype, out.shape) == (found.dtype, found.shape)
        out[...] = found
        self.bytes_read += found.nbytes

    def chunk(self, entries: NDArray[np.uint8] | None = None) -> ChunkCache:
        return self._chunk

    def verify(self) -> None:
        """Does nothing: there is no file to check."""

    def is_current(self) -> bool:
        """True: the cache is opened anew for each prompt."""
        return True

    def let_go(self) -> None: ...

    def close(self) -> None: ...


class _InMemory(dict[Place, ChunkCache]):
    """The caches of a `MemoryStore`, by fingerprint and key, for its index."""

    def entries(self) -> Iterable[Entry]:
        return ()

    def is_gone(self, digest: str, key: str) -> bool:
        return (digest, key) not in self

    def remove(self, digest: str, key: str) -> None:
        self.pop((digest, key), None)


class MemoryStore(IndexedStore):
    """Chunk caches in this process's memory, with their index."""

    path = None

    def __init__(self, *, namespace: str = "") -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        self._chunks = _InMemory()
        index = Index(None, self._chunks, secret)
        super().__init__(namespace, secret, index, "memory")

    def put(self, chunk: ChunkCache, *, unless_deleted_since: int | None = None) -> None:
        with self.index.keep(Entry.of(chunk, self.namespace), unless_deleted_since):
            self._chunks[chunk.fingerprint.digest, chunk.key] = chunk

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        chunk = self._chunks.get((fingerprint.digest, key))
        if chunk is None:
            raise CacheMiss("absent", key)
        if token_ids is not None and chunk.token_ids.tolist() != list(token_ids):
            raise CacheMiss("tokens", f"chunk {key} holds {chunk.n_tokens} other tokens")
        return MemoryChunk(chunk, fingerprint)

    def note(self, name: str) -> str | None:
        found = self.index.setting(f"note {name}")
        return None if found is None else str(found)

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        return self.index.set(f"note {name}", text, replace=replace)

    def note_place(self, name: str) -> str:
        return name

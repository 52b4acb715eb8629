"""Chunk caches in this process's memory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

from torch import Tensor

from samkv_integrations.cache.base import Store, StoredChunk
from samkv_integrations.cache.chunk import (
    SECRET_BYTES,
    BlockMeans,
    ChunkCache,
    ChunkStatistics,
    Fingerprint,
)
from samkv_integrations.cache.file_format import text_bytes
from samkv_integrations.cache.index import PRESENT, Entry, Index, Place
from samkv_integrations.cache.quantise import is_sound
from samkv_integrations.errors import CacheMiss


class MemoryChunk:
    """A chunk cache in memory, opened; counts each group of tensors when first handed out."""

    def __init__(self, chunk: ChunkCache, fingerprint: Fingerprint) -> None:
        self.key, self.fingerprint = chunk.key, fingerprint
        self.n_tokens, self.blocks = chunk.n_tokens, chunk.blocks
        self.token_ids = chunk.token_ids
        self.bytes_read = chunk.token_ids.nbytes
        self._chunk: ChunkCache | None = chunk
        self._counted: set[str] = set()

    def _open_chunk(self) -> ChunkCache:
        assert self._chunk is not None, "closed"
        return self._chunk

    def _count(self, group: str, n_bytes: int) -> None:
        if group not in self._counted:
            self._counted.add(group)
            self.bytes_read += n_bytes

    def statistics(self) -> ChunkStatistics:
        found = self._open_chunk().statistics
        tensors = (found.block_max, found.block_min, found.outliers, found.stable)
        self._count("statistics", sum(tensor.nbytes for tensor in tensors))
        return found

    def text(self) -> str:
        found = self._open_chunk().text
        self._count("text", len(text_bytes(found)))
        return found

    def local_query(self) -> Tensor:
        found = self._open_chunk().local_query
        self._count("local_query", found.nbytes)
        return found

    def block_means(self) -> BlockMeans:
        found = self._open_chunk().block_means
        self._count("block_means", found.codes.nbytes + found.scale.nbytes)
        return found

    def key_range(self) -> Tensor:
        found = self._open_chunk().key_range
        self._count("key_range", found.nbytes)
        if not is_sound(found):
            raise CacheMiss("corrupt", f"{self.key}: key_range")
        return found

    def read_all(self, out: Sequence[Tensor]) -> None:
        entries = self._open_chunk().entries
        assert len(out) == len(entries)
        self.key_range()
        for layer, found in zip(out, entries, strict=True):
            assert (layer.dtype, layer.shape) == (found.dtype, found.shape)
            assert layer.is_contiguous()
            layer.copy_(found)
        self.bytes_read += entries.nbytes

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        entries = self._open_chunk().entries
        assert layer >= 0 and min(blocks, default=0) >= 0
        tokens = [token for block in blocks for token in range(*self.blocks.span(block))]
        found = entries[layer, tokens]
        assert (out.dtype, out.shape) == (found.dtype, found.shape)
        out.copy_(found)
        self.bytes_read += found.nbytes

    def chunk(self) -> ChunkCache:
        self.key_range()
        return self._open_chunk()

    def verify(self) -> None:
        self.key_range()

    def let_go(self) -> None:
        """There is no file."""

    def close(self) -> None:
        self._chunk = None

    def __enter__(self) -> MemoryChunk:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _InMemory(dict[Place, ChunkCache]):
    """The caches of a `MemoryStore`, by fingerprint and key."""

    def entries(self) -> Iterable[Entry]:
        return ()

    def is_gone(self, digest: str, key: str) -> bool:
        return (digest, key) not in self

    def remove(self, digest: str, key: str) -> None:
        self.pop((digest, key), None)


class MemoryStore(Store):
    """Chunk caches in this process's memory, as they came; the index is there too."""

    def __init__(self, *, namespace: str = "") -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        self._chunks = _InMemory()
        index = Index(None, self._chunks, secret)
        super().__init__(namespace, secret, index, "the memory store")

    def put(self, chunk: ChunkCache) -> None:
        place = (chunk.fingerprint.digest, chunk.key)

        def keep() -> None:
            self._chunks[place] = chunk

        self.index.keep(Entry.of(chunk, self._namespace), keep)

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        chunk = self._chunks.get((fingerprint.digest, key))
        if chunk is None:
            raise CacheMiss("absent", key)
        return self._expect(MemoryChunk(chunk, fingerprint), token_ids)

    def contains(self, key: str, fingerprint: Fingerprint) -> bool:
        return (fingerprint.digest, key) in self._chunks

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        state, used_at = self.index.state(fingerprint.digest, key)
        return max(0.0, time.time() - used_at) if state == PRESENT else None

    def note(self, name: str) -> str | None:
        found = self.index.setting(f"note {name}")
        return None if found is None else str(found)

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        return self.index.set(f"note {name}", text, replace=replace)

"""Chunk caches in this process's memory."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict

from torch import Tensor

from samkv_integrations.cache.base import StoredChunk, _expect
from samkv_integrations.cache.chunk import (
    SECRET_BYTES,
    BlockMeans,
    ChunkCache,
    ChunkStatistics,
    Fingerprint,
    _require,
    _without_block_size,
    check_namespace,
    chunk_key,
    normalise,
)
from samkv_integrations.cache.file_format import FileLayout, text_bytes
from samkv_integrations.cache.quantise import is_sound
from samkv_integrations.cache.stats import StoreStats, _stats
from samkv_integrations.cache.windows import ChunkIndex, MemoryIndex
from samkv_integrations.errors import CacheMiss


class MemoryChunk:
    """A chunk of a `MemoryStore`; counts each group of tensors when first handed out."""

    def __init__(self, chunk: ChunkCache, fingerprint: Fingerprint) -> None:
        self.key = chunk.key
        self.fingerprint = fingerprint
        self.n_tokens = chunk.n_tokens
        self.blocks = chunk.blocks
        self.token_ids = chunk.token_ids
        self.bytes_read = chunk.token_ids.nbytes
        self._chunk: ChunkCache | None = chunk
        self._counted: set[str] = set()

    def _count(self, group: str, *tensors: Tensor) -> None:
        if group not in self._counted:
            self._counted.add(group)
            self.bytes_read += sum(tensor.nbytes for tensor in tensors)

    def _open_chunk(self) -> ChunkCache:
        assert self._chunk is not None, "closed"
        return self._chunk

    def statistics(self) -> ChunkStatistics:
        found = self._open_chunk().statistics
        self._count("statistics", found.block_max, found.block_min, found.outliers, found.stable)
        return found

    def text(self) -> str:
        found = self._open_chunk().text
        if "text" not in self._counted:
            self._counted.add("text")
            self.bytes_read += len(text_bytes(found))
        return found

    def local_query(self) -> Tensor:
        found = self._open_chunk().local_query
        self._count("local_query", found)
        return found

    def block_means(self) -> BlockMeans:
        found = self._open_chunk().block_means
        self._count("block_means", found.codes, found.scale)
        return found

    def key_range(self) -> Tensor:
        found = self._open_chunk().key_range
        self._count("key_range", found)
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
        self._open_chunk()
        self.key_range()

    def let_go(self) -> None:
        """There is no file."""

    def close(self) -> None:
        self._chunk = None

    def __enter__(self) -> MemoryChunk:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class MemoryStore:
    """Chunk caches in this process's memory, as they came. The oracle for `ChunkStore`."""

    def __init__(self, *, namespace: str = "") -> None:
        self._namespace = check_namespace(namespace)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._chunks: dict[tuple[str, str], ChunkCache] = {}
        # key -> fingerprint -> text; they stay where a cache is lost
        self._texts: dict[str, dict[str, str]] = {}
        self._indexes: dict[str, MemoryIndex] = {}  # by fingerprint
        self._changing = threading.Lock()
        self._block_sizes: dict[str, int] = {}
        self._put_at: dict[tuple[str, str], float] = {}
        self._notes: dict[str, str] = {}

    @property
    def namespace(self) -> str:
        return self._namespace

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        return self._key(fingerprint.digest, token_ids)

    def put(self, chunk: ChunkCache) -> None:
        with self._changing:
            self._chunks[chunk.fingerprint.digest, chunk.key] = chunk
            self._put_at[chunk.fingerprint.digest, chunk.key] = time.time()
            self._texts.setdefault(chunk.key, {})[chunk.fingerprint.digest] = chunk.text
        self._index(chunk.fingerprint.digest).add(chunk.key, chunk.token_ids.tolist())

    def _index(self, digest: str) -> MemoryIndex:
        return self._indexes.setdefault(digest, MemoryIndex(self._secret))

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        chunk = self._chunks.get((fingerprint.digest, key))
        if chunk is None:
            raise CacheMiss("absent", key)
        return _expect(MemoryChunk(chunk, fingerprint), token_ids)

    def contains(self, key: str, fingerprint: Fingerprint) -> bool:
        return (fingerprint.digest, key) in self._chunks

    def is_elsewhere(self, key: str, fingerprint: Fingerprint) -> bool:
        return False

    def look_ahead(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        """There is no remote tier."""

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        """There is no remote tier."""

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        put_at = self._put_at.get((fingerprint.digest, key))
        return None if put_at is None else max(0.0, time.time() - put_at)

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        if (fingerprint.digest, key) in self._put_at:
            self._put_at[fingerprint.digest, key] = time.time()

    def text(self, key: str) -> str | None:
        return next(iter(list(self._texts.get(key, {}).values())), None)

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        return self._index(fingerprint.digest)

    def prefetch(self, key: str, fingerprint: Fingerprint) -> None:
        """There is nothing to read from."""

    def check_delete(self, *keys: str) -> None:
        """Nothing is in the way."""

    def delete(self, *keys: str) -> int:
        with self._changing:
            found = [key for key in dict.fromkeys(keys) if key in self._texts]
            for key in found:
                for digest in list(self._texts[key]):
                    self._remove(digest, key)
            return len(found)

    def _remove(self, digest: str, key: str) -> None:
        self._chunks.pop((digest, key), None)
        self._put_at.pop((digest, key), None)
        del self._texts[key][digest]
        self._index(digest).remove(key)
        if not self._texts[key]:
            del self._texts[key]

    def forget(
        self,
        is_wanted: Callable[[str], bool],
        token_ids: Sequence[Sequence[int]] = (),
    ) -> int:
        with self._changing:
            named = {
                digest: {self._key(digest, ids) for ids in token_ids} for digest in self._indexes
            }
            found = [
                (digest, key)
                for key, by_digest in self._texts.items()
                for digest, text in by_digest.items()
                if (key in named[digest] or is_wanted(normalise(text)))
                and self._may_be_ours(digest, key)
            ]
            for digest, key in found:
                self._remove(digest, key)
        return len(found)

    def _may_be_ours(self, digest: str, key: str) -> bool:
        """Whether no cache says that the chunk is of another namespace."""
        chunk = self._chunks.get((digest, key))
        return chunk is None or key == self._key(digest, chunk.token_ids.tolist())

    def _key(self, digest: str, token_ids: Sequence[int]) -> str:
        return chunk_key(self._secret, self._namespace, digest, token_ids)

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        wanted = fingerprint.digest if fingerprint else None
        return sorted({key for digest, key in list(self._chunks) if wanted in (None, digest)})

    def known_keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        wanted = fingerprint.digest if fingerprint else None
        with self._changing:
            return sorted(k for k, held in self._texts.items() if wanted is None or wanted in held)

    def same_texts(self, *keys: str) -> set[str]:
        with self._changing:
            texts = {text for key in keys for text in self._bodies(key)}
            return {*keys, *(key for key in self._texts if texts & self._bodies(key))}

    def _bodies(self, key: str) -> set[str]:
        return {normalise(text) for text in self._texts.get(key, {}).values()}

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        return self._block_sizes.setdefault(_without_block_size(fingerprint), size)

    def note(self, name: str) -> str | None:
        return self._notes.get(name)

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        with self._changing:
            if not replace and name in self._notes:
                return False
            self._notes[name] = text
            return True

    def fingerprints(self) -> list[Fingerprint]:
        held = {digest: chunk.fingerprint for (digest, _), chunk in list(self._chunks.items())}
        return [held[digest] for digest in sorted(held)]

    def stats(self) -> StoreStats:
        """``bytes`` is what the chunks' files would take."""
        sizes: dict[str, list[int]] = {}
        for (digest, key), chunk in list(self._chunks.items()):
            size = FileLayout.of(chunk, self._namespace).file_size(key)
            sizes.setdefault(digest, []).append(size)
        known = {held.digest: asdict(held) for held in self.fingerprints()}
        totals = [(self._namespace, d, len(of_one), sum(of_one)) for d, of_one in sizes.items()]
        return _stats(known, sorted(totals))

    def require(self, fingerprint: Fingerprint) -> None:
        _require(fingerprint, self.fingerprints(), "the memory store")

    def elsewhere(self) -> str | None:
        return None

    def record(
        self, fingerprint: Fingerprint, *, used: Sequence[str] = (), missed: Sequence[str] = ()
    ) -> None:
        """There is no budget, so nothing is evicted."""

    def quarantine(self, key: str, fingerprint: Fingerprint) -> None:
        with self._changing:
            self._chunks.pop((fingerprint.digest, key), None)
            self._put_at.pop((fingerprint.digest, key), None)

    def is_evicted(self, key: str, fingerprint: Fingerprint) -> bool:
        return False

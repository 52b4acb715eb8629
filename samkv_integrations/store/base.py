"""The contract of a store of chunk caches and of an opened cache, and both in memory."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from torch import Tensor

from samkv_integrations.chunks.chunk import (
    SECRET_BYTES,
    BlockMeans,
    ChunkBlocks,
    ChunkCache,
    ChunkStatistics,
    Fingerprint,
    check_keys,
    check_namespace,
    chunk_key,
    normalise,
)
from samkv_integrations.errors import CacheMiss, FingerprintMismatch, Given, StoreError
from samkv_integrations.store.index import EVICTED, Entry, Index, IndexedChunks, Place
from samkv_integrations.store.windows import ChunkIndex

_log = logging.getLogger(__name__)


class StoredChunk(Protocol):
    """One chunk cache, opened for reading; a context manager. For one thread at a time.

    It stays readable after its chunk was deleted or replaced in the store, until `let_go`. Every
    method that reads raises `CacheMiss`: "corrupt" if bytes are missing or fail their MAC, "io" if
    the operating system fails. What a method without arguments gives is read once. Returned tensors
    belong to the store: do not modify them.

    token_ids: (T,) int32.
    bytes_read: so far; from a file, with header and MACs.
    """

    key: str
    fingerprint: Fingerprint
    n_tokens: int
    blocks: ChunkBlocks
    token_ids: Tensor
    bytes_read: int

    def text(self) -> str:
        """The chunk's text."""

    def statistics(self) -> ChunkStatistics:
        """The attention statistics."""

    def local_query(self) -> Tensor:
        """(L, H, D) in the model's dtype."""

    def block_means(self) -> BlockMeans:
        """The mean key of each middle block."""

    def key_range(self) -> Tensor:
        """(L, N, 2, G, D) float16, see `ChunkCache`."""

    def read_layers(self, first: int, out: Sequence[Tensor]) -> None:
        """Read the entries of all tokens at the layers from ``first`` on, and the key range.

        out: filled; a contiguous CPU tensor (T, E) uint8 for each layer.
        """

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        """Read the entries of ``blocks`` at ``layer``; in ascending order neighbours are one read.

        out: filled; a contiguous CPU tensor (S, E) uint8, where S is the sum of the blocks'
            lengths.
        """

    def chunk(self) -> ChunkCache:
        """The whole cache as it was put, verified."""

    def verify(self) -> None:
        """Read everything and check every MAC."""

    def let_go(self) -> None:
        """Keep no file open between reads.

        If the chunk is deleted, evicted or replaced later, reads may raise `CacheMiss` ("absent").
        """

    def close(self) -> None:
        """Free what it holds. It must not be read afterwards; closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class FingerprintStats:
    """What a store holds of one fingerprint in one namespace.

    bytes: of chunk files.
    hits, misses: chunks of prompts that had a cache, and that had none.
    evicted: caches that made room for others. corrupt: caches that were found damaged.
    """

    model: str
    dtype: str
    store_bits: int
    block_size: int
    prefix: str
    format_version: int
    chunks: int
    bytes: int
    namespace: str = ""
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    corrupt: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the chunks of prompts that had a cache; None before the first prompt."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds, in all and by fingerprint and namespace.

    max_bytes: the budget of all namespaces together; None for no limit.
    """

    n_chunks: int
    bytes: int
    rows: tuple[FingerprintStats, ...]
    max_bytes: int | None = None


_STORE_FAILS = (
    "the store fails (%s); chunks whose cache it cannot give are computed from their text. This is "
    "said once"
)


class Outage:
    """Logs the failures of a store or remote tier, which fail no answer.

    Args:
        says: the message, with ``%s`` for the error.
    """

    def __init__(self, says: str = _STORE_FAILS) -> None:
        self._says, self._has_warned = says, False

    @contextmanager
    def survived(self) -> Iterator[None]:
        """A block that a `StoreError` ends: it is logged, and not raised."""
        try:
            yield
        except StoreError as error:
            self.tell(error)

    def tell(self, error: Exception) -> None:
        """Log a failure: a warning the first time, at DEBUG from then on."""
        is_first, self._has_warned = not self._has_warned, True
        _log.log(logging.WARNING if is_first else logging.DEBUG, self._says, error)


class Store:
    """Chunk caches by key. What cannot be read raises `CacheMiss`; no wrong tensor is returned.

    Only `put`, `touch`, `delete`, `forget` and `quarantine` change the chunks of a store, and every
    process sees a change at once. `key`, `open`, `contains`, `is_elsewhere`, `begin_to_fetch`,
    `touch`, `chunk_index`, `note`, `record` and `quarantine` never raise `StoreError`; the other
    methods do if the store cannot be used.

    This class implements what the index answers. A subclass implements the methods that raise
    NotImplementedError, and those of a remote tier if it has one.
    """

    namespace: str = ""
    """Part of every key: in another namespace the same text has another key and cache."""

    def __init__(self, namespace: str, secret: bytes, index: Index, where: str) -> None:
        self.namespace = check_namespace(namespace)
        self.secret, self.index, self._where = secret, index, where

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        """The key of the chunk with these tokens, in this store and namespace."""
        return chunk_key(self.secret, self.namespace, fingerprint.digest, token_ids)

    # -- single caches --------------------------------------------------------------------------

    def put(self, chunk: ChunkCache, *, unless_deleted_since: int | None = None) -> None:
        """Keep a chunk, in place of one with the same key and fingerprint.

        Atomic: others see the whole chunk, or what was there before. ``chunk`` must not be modified
        afterwards.

        unless_deleted_since: an earlier value of `Index.deletions`. If something was deleted since,
            the chunk is not kept, and `CacheMiss` ("absent") is raised.
        """
        raise NotImplementedError

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """Open a chunk and verify its identity.

        Raises `CacheMiss`: "absent", "corrupt", "format" (another version of the file format),
        "fingerprint" (of another model, or another chunk), "tokens" (not ``token_ids``), "io".
        """
        raise NotImplementedError

    def contains(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether there is a cache. Nothing is read, so opening it may still miss.

        A file that a killed process left unindexed does not count: it is written again.
        """
        with suppress(StoreError):
            return self.index.has(fingerprint.digest, key)
        return False

    def is_elsewhere(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether the cache is in the remote tier only; `open` fetches and verifies it.

        It may have been deleted there within the last minute.
        """
        return False

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        """Begin to fetch those that are in the remote tier only, in parallel. Best effort."""

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        """Seconds since a cache was put, touched or used; None if the chunk is unknown."""
        state, used_at = self.index.state(fingerprint.digest, key)
        return None if state is None else max(0.0, time.time() - used_at)

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        """Make a cache as young as one that is put now. Best effort."""
        with suppress(StoreError):
            self.index.touch(fingerprint.digest, key)

    def record(
        self,
        fingerprint: Fingerprint,
        *,
        used: Sequence[str] = (),
        missed: Sequence[str] = (),
    ) -> None:
        """Note which chunks of a prompt had a cache, and which had none, by key. Best effort.

        Hit rates and the order of eviction follow from it.
        """
        with suppress(StoreError):
            self.index.record(self.namespace, fingerprint.digest, used, missed)

    def quarantine(self, key: str, fingerprint: Fingerprint) -> None:
        """Delete a damaged cache; its text stays known. Best effort."""
        with suppress(StoreError):
            self.index.lose([(fingerprint.digest, key)], are_damaged=True)

    def is_evicted(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether a cache was put, and evicted since."""
        return self.index.state(fingerprint.digest, key)[0] == EVICTED

    # -- deletion -------------------------------------------------------------------------------

    def check_delete(self, *keys: str) -> None:
        """Raises StoreError if `delete` would, as far as that can be known before."""

    def delete(self, *keys: str) -> int:
        """Delete chunks and their texts under all fingerprints; how many there were.

        Raises InvalidOption for what is no key.
        """
        check_keys(keys)
        return len(self.index.delete(self.namespace, keys))

    def forget(
        self, is_wanted: Callable[[str], bool], token_ids: Sequence[Sequence[int]] = ()
    ) -> int:
        """Delete chunks of this namespace by their text, for all models and bits; how many.

        Unlike `delete` it also finds texts without a cache, damaged files, and what killed
        processes left.

        is_wanted: is given the body of each chunk.
        token_ids: of chunks to delete whatever their text is: that of a damaged one is unknown.
        """
        texts = self.index.texts(self.namespace)
        named = {
            chunk_key(self.secret, self.namespace, digest, ids)
            for digest in {digest for digest, *_ in texts}
            for ids in token_ids
        }
        keys = {
            key for _, key, body in texts if key in named or (body and is_wanted(normalise(body)))
        }
        self.delete(*sorted(keys))
        return len(keys)

    # -- what there is --------------------------------------------------------------------------

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        """Sorted keys of the chunks with a cache, of one fingerprint or of all."""
        return self.index.keys(self.namespace, fingerprint, are_present=True)

    def known_keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        """Sorted keys of the chunks whose text is known, with or without a cache."""
        return self.index.keys(self.namespace, fingerprint)

    def same_texts(self, *keys: str) -> set[str]:
        """These keys, and those of chunks of any fingerprint with the same body as one of them."""
        return self.index.same_texts(self.namespace, keys)

    def text(self, key: str) -> str | None:
        """The text of a chunk of any fingerprint; None if it is unknown."""
        return next((text for *_, text in self.index.texts(self.namespace, key)), None)

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        """An index that finds the chunks of a fingerprint in prompts, by their token ids.

        It also finds known texts whose cache is gone; these count as misses. Its methods raise
        `StoreError` if the store cannot be used.
        """
        return IndexedChunks(self.index, self.namespace, fingerprint.digest)

    def fingerprints(self) -> list[Fingerprint]:
        """The fingerprints of known chunks, by digest."""
        return self.index.fingerprints(self.namespace)

    def require(self, fingerprint: Fingerprint) -> None:
        """Raises `FingerprintMismatch` if there are chunks, and none of this fingerprint."""
        held = self.fingerprints()
        if held and fingerprint.digest not in {each.digest for each in held}:
            raise _mismatch(fingerprint, held, self._where)

    def elsewhere(self) -> str | None:
        """If the default namespace is empty: namespaces of the store that have caches, in words."""
        names = sorted({namespace for namespace, *_ in self.index.totals(None)})
        if self.namespace or not names or "" in names:
            return None  # a named namespace that is empty is a new one
        named = " and ".join(map(repr, names[:3]))
        return f"namespace {named} of {self._where} (give namespace=)"

    def stats(self, *, everyone: bool = False) -> StoreStats:
        """What the store holds. everyone: of all namespaces, not only of this one."""
        made_by = {each.digest: each for each in self.index.fingerprints()}
        sums: dict[FingerprintStats, Counter[str]] = {}
        for namespace, digest, *figures in self.index.totals(None if everyone else self.namespace):
            if (known := made_by.get(digest)) is not None:
                row = FingerprintStats(
                    model=known.model, dtype=known.dtype, store_bits=known.store_bits,
                    block_size=known.block_size, prefix=known.prefix,
                    format_version=known.format_version, namespace=namespace, chunks=0, bytes=0,
                )  # fmt: skip
                names = ("chunks", "bytes", "hits", "misses", "evicted", "corrupt")
                sums.setdefault(row, Counter()).update(dict(zip(names, figures, strict=True)))
        rows = tuple(replace(row, **dict[str, Any](figures)) for row, figures in sums.items())
        return StoreStats(
            n_chunks=sum(row.chunks for row in rows), bytes=sum(row.bytes for row in rows),
            rows=rows, max_bytes=self.index.budget()[0],
        )  # fmt: skip

    # -- settings and notes ---------------------------------------------------------------------

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        """The first caller's block size for chunks that are like ``fingerprint`` in all else."""
        # the name must not depend on the block size
        name = f"block-size {replace(fingerprint, block_size=1).digest} {self.namespace}"
        self.index.set(name, size, replace=False)
        return int(self.index.setting(name))

    def note(self, name: str) -> str | None:
        """What `put_note` kept under ``name``; None if there is nothing that can be read."""
        raise NotImplementedError

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        """Keep a short text beside the caches under a file name; whether it was kept.

        replace: whether to replace an earlier note. If not, the first of several processes wins.
        """
        raise NotImplementedError


def _mismatch(wanted: Fingerprint, held: Sequence[Fingerprint], where: str) -> FingerprintMismatch:
    """Names the fields in which the most similar fingerprint differs, and the next step."""
    mine = asdict(wanted)

    def differing(other: Fingerprint) -> dict[str, Any]:
        fields = asdict(other).items()
        return {name: value for name, value in fields if name != "model" and value != mine[name]}

    closest = min(held, key=lambda other: len(differing(other)))
    there = differing(closest)
    if "weights" in there:  # another model: other differences follow from it
        there = {name: there[name] for name in ("weights", "dtype") if name in there}
    fields = ", ".join(
        "chunks stand after another prefix there"
        if name == "prefix"
        else f"{name} is {mine[name]!r:.40} here and {value!r:.40} there"
        for name, value in there.items()
    )
    options: list[object] = [
        Given(name, there[name]) for name in ("dtype", "store_bits") if name in there
    ]
    if "weights" in there and closest.model != wanted.model:
        options.insert(0, f"the model {closest.model!r} (--model of a command)")
    elif "prefix" in there:
        options.append("the prefix= and prefix_text= of the engine that filled it")
    instead = [part for option in options for part in (" and ", option)][1:]
    return FingerprintMismatch(
        f"{where} holds no cache of the loaded model {wanted.model!r}; the closest it holds is of "
        f"{closest.model!r}: {fields}; next step: ingest again",
        *([", or give ", *instead] if instead else ()),
    )


# -- in memory ------------------------------------------------------------------------------------


class MemoryChunk(StoredChunk):
    """An opened chunk cache in memory. Token ids and entries count as bytes read."""

    def __init__(self, chunk: ChunkCache, fingerprint: Fingerprint) -> None:
        self.key, self.fingerprint = chunk.key, fingerprint
        self.n_tokens, self.blocks = chunk.n_tokens, chunk.blocks
        self.token_ids = chunk.token_ids
        self.bytes_read = chunk.token_ids.nbytes
        self._chunk = chunk

    def text(self) -> str:
        return self._chunk.text

    def statistics(self) -> ChunkStatistics:
        return self._chunk.statistics

    def local_query(self) -> Tensor:
        return self._chunk.local_query

    def block_means(self) -> BlockMeans:
        return self._chunk.block_means

    def key_range(self) -> Tensor:
        return self._chunk.key_range

    def read_layers(self, first: int, out: Sequence[Tensor]) -> None:
        entries = self._chunk.entries[first : first + len(out)]
        assert first >= 0 and len(out) == len(entries)
        for layer, found in zip(out, entries, strict=True):
            assert (layer.dtype, layer.shape) == (found.dtype, found.shape)
            assert layer.is_contiguous()
            layer.copy_(found)
        self.bytes_read += entries.nbytes

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        assert layer >= 0 and min(blocks, default=0) >= 0
        tokens = [token for block in blocks for token in range(*self.blocks.span(block))]
        found = self._chunk.entries[layer, tokens]
        assert (out.dtype, out.shape) == (found.dtype, found.shape)
        out.copy_(found)
        self.bytes_read += found.nbytes

    def chunk(self) -> ChunkCache:
        return self._chunk

    def verify(self) -> None:
        """Does nothing, as do the others: there is no file."""

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


class MemoryStore(Store):
    """Chunk caches in this process's memory, with their index."""

    def __init__(self, *, namespace: str = "") -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        self._chunks = _InMemory()
        index = Index(None, self._chunks, secret)
        super().__init__(namespace, secret, index, "the memory store")

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

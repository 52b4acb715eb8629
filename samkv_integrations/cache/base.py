"""What a store of chunk caches does, an opened chunk cache, and what all stores have in common."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Protocol, Self

from torch import Tensor

from samkv_integrations.cache.chunk import (
    BlockMeans,
    ChunkBlocks,
    ChunkCache,
    ChunkStatistics,
    Fingerprint,
    _require,
    check_keys,
    check_namespace,
    chunk_key,
    normalise,
)
from samkv_integrations.cache.index import EVICTED, Index, IndexedChunks
from samkv_integrations.cache.windows import ChunkIndex
from samkv_integrations.errors import CacheMiss, SamkvError, StoreError

_log = logging.getLogger(__name__)


class StoredChunk(Protocol):
    """One chunk cache opened for reading; a context manager.

    Stays readable after its chunk was deleted or replaced in the store, until `let_go`. Every
    method that reads raises `CacheMiss`: "corrupt" if bytes are missing or fail their MAC, "io" if
    the operating system fails. Tensors handed out are the store's own: do not modify them. One
    thread at a time.

    token_ids: (T,) int32.
    bytes_read: so far; of a file those of every read issued, header and MACs included.
    """

    key: str
    fingerprint: Fingerprint
    n_tokens: int
    blocks: ChunkBlocks
    token_ids: Tensor
    bytes_read: int

    def text(self) -> str:
        """The text that was put with it. Read once."""

    def statistics(self) -> ChunkStatistics:
        """The attention statistics. Read once."""

    def local_query(self) -> Tensor:
        """(L, H, D) in the model's dtype. Read once."""

    def block_means(self) -> BlockMeans:
        """The mean key of each middle block. Read once."""

    def key_range(self) -> Tensor:
        """(L, N, 2, G, D) float16, see `ChunkCache`.

        Read once, by `read_layers` if that comes first.
        """

    def read_layers(self, first: int, out: Sequence[Tensor]) -> None:
        """Reads the entries of all tokens at layers from ``first`` on, and the key range once.

        ``out`` is written: a contiguous CPU tensor (T, E) uint8 for each of these layers, which may
        be a part of a larger one. After a `CacheMiss` its content is undefined.
        """

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        """Reads the entries of ``blocks`` at ``layer``, and no others, in the order given.

        Blocks that are neighbours in the file are read at once, so ascending order is the fastest.
        ``out`` is written: a contiguous CPU tensor (S, E) uint8, S the sum of the blocks' lengths.
        After a `CacheMiss` its content is undefined.
        """

    def chunk(self) -> ChunkCache:
        """All of it, verified, as it was put."""

    def verify(self) -> None:
        """Reads everything and checks every MAC."""

    def let_go(self) -> None:
        """Holds no file open from now on, but while it reads.

        A chunk that is deleted, evicted or replaced meanwhile may be a miss: "absent".
        """

    def close(self) -> None:
        """Frees what it holds; reading afterwards is a mistake. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


BEHIND_HEADS = "behind heads of prompts"
"""The ``prefix`` in statistics of all exact beginnings together, see `Store.behind`."""

_FIGURES = ("chunks", "bytes", "hits", "misses", "evicted", "corrupt")


@dataclass(frozen=True, kw_only=True)
class FingerprintStats:
    """What a store holds of one fingerprint and namespace; ``bytes`` counts chunk files.

    prefix: what chunks stand after there, see `Fingerprint`; `BEHIND_HEADS` for all beginnings of
        prompts together, see `Store.behind`.
    hits, misses: chunks of prompts that were answered from a cache, and that had none.
    evicted: caches that went for want of room. corrupt: damaged ones that were found.
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
        """Share of the chunks of prompts that were answered from a cache; None before any."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


def _counted(row: FingerprintStats, figures: Mapping[str, int]) -> FingerprintStats:
    return FingerprintStats(**{**asdict(row), **figures})


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds, in all and by fingerprint and namespace.

    n_chunks: those of beginnings do not count, which are others' again; bytes: theirs do.
    max_bytes: what the chunk files of all namespaces may take; None for no limit.
    """

    n_chunks: int
    bytes: int
    rows: tuple[FingerprintStats, ...]
    max_bytes: int | None = None


_STORE_FAILS = (
    "the store fails (%s); prompts are answered all the same, from the text of what it cannot "
    "give. This is said once"
)


class Outage:
    """What one engine does about a store that fails under it: a prompt needs no store.

    Safe to use from many threads.

    Args:
        says: what is logged, with a place for the error.
    """

    def __init__(self, says: str = _STORE_FAILS) -> None:
        self._says = says
        self._lock = threading.Lock()
        self._has_warned = False

    @contextmanager
    def survived(self) -> Iterator[None]:
        """A block that a `StoreError` ends, and no more: it is told instead of raised."""
        try:
            yield
        except StoreError as error:
            self.tell(error)

    def tell(self, error: SamkvError) -> None:
        """Log what failed: a warning the first time, at DEBUG from then on."""
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        _log.log(logging.WARNING if is_first else logging.DEBUG, self._says, error)


class Store:
    """Chunk caches by key. Whatever cannot be read is a `CacheMiss`, never a wrong tensor.

    Only `put`, `touch`, `delete`, `forget` and `quarantine` modify the chunks of a
    store, and what any process did is seen at once by all. Methods other than `key`, `open`,
    `contains`, `is_elsewhere`, `look_ahead`, `begin_to_fetch`, `age_s`, `touch`, `chunk_index`,
    `prefetch`, `note`, `record` and `quarantine` raise `StoreError` if the store itself is not
    usable.

    Here is what the index answers, whatever caches are kept in, and what a store does without a
    remote tier.
    """

    keeps_beginnings: ClassVar[bool] = False
    """Whether exact beginnings of prompts are made for it, see `behind`."""

    def __init__(self, namespace: str, secret: bytes, index: Index, where: str) -> None:
        self._namespace = check_namespace(namespace)
        self.secret, self.index, self._where = secret, index, where

    @property
    def namespace(self) -> str:
        """Part of every key: the same text has another key, and cache, in another namespace."""
        return self._namespace

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        """The key of the chunk with these tokens, in this store and namespace."""
        return chunk_key(self.secret, self._namespace, fingerprint.digest, token_ids)

    def put(self, chunk: ChunkCache, *, unless_deleted_since: int | None = None) -> None:
        """Keeps a chunk, in place of one with the same key and fingerprint.

        unless_deleted_since: what `Index.deletions` said before; if something was deleted since,
            the chunk is not kept, and that is a `CacheMiss` "absent".

        Atomic: others see the whole chunk or what was there before. If the store cannot be written
        the text may have been kept all the same. ``chunk`` must not be modified afterwards.
        Several threads may put chunks at a time.
        """
        raise NotImplementedError

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """Opens a chunk and verifies its identity.

        Raises `CacheMiss`: "absent", "corrupt", "format" (a file of another format version),
        "fingerprint" (computed by another model), "tokens" (another chunk, or not ``token_ids``),
        "io".
        """
        raise NotImplementedError

    def contains(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether a chunk is there. Cheap: nothing is read, so opening it may still miss."""
        raise NotImplementedError

    def is_elsewhere(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether a chunk is in the remote tier only: `open` fetches it, and verifies all of it."""
        return False

    def look_ahead(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        """Chunks that `contains` is going to be asked for, so that a remote tier is asked once."""

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        """Begins to bring chunks here that are in a remote tier only, together. Best effort."""

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        """Seconds since a chunk was put or touched, None if it is not there."""
        raise NotImplementedError

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        """Makes a chunk as young as one that is put now. A chunk that is not there stays away.

        Best effort: a folder that can only be read keeps its ages, and all its chunks.
        """
        with suppress(StoreError, CacheMiss):
            self.index.record(self._namespace, fingerprint.digest, [key], are_counted=False)

    def text(self, key: str) -> str | None:
        """The text of a chunk of any fingerprint, the one put last; None if it is unknown."""
        return next((text for *_, text in self.index.texts(self._namespace, key)), None)

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        """The chunks of a fingerprint and this namespace, to be found in prompts by token ids.

        A chunk whose cache was evicted or lost is in it all the same: a counted miss. Its methods
        raise `StoreError` if the store is not usable.
        """
        return IndexedChunks(self.index, self._namespace, fingerprint.digest)

    def prefetch(self, key: str, fingerprint: Fingerprint) -> None:
        """Begins to read a chunk, all of it, without waiting.

        Nothing but a hint: whatever goes wrong, `open` will say.
        """

    def check_delete(self, *keys: str) -> None:
        """Raises StoreError if `delete` would, as far as that can be known before."""

    def delete(self, *keys: str) -> int:
        """Removes chunks and their texts under all fingerprints; how many there were.

        Raises InvalidOption for what is no key.
        """
        check_keys(keys)
        return len(self.index.delete(self._namespace, keys))

    def forget(
        self, is_wanted: Callable[[str], bool], token_ids: Sequence[Sequence[int]] = ()
    ) -> int:
        """Removes chunks of this namespace, of any model and bits; how many.

        Unlike `delete` it looks at the files: texts without a cache, what a writer that was killed
        has left, and files that are damaged go too.

        is_wanted: which chunks, asked with the body of each.
        token_ids: of chunks that go whatever their text is, as a damaged one says nothing.
        """
        return self.delete(*self._wanted(is_wanted, token_ids))

    def behind(self, fingerprint: Fingerprint, head: Sequence[int]) -> Fingerprint:
        """That of the chunks which stand behind the token ids ``head`` of a prompt.

        Their entries are full prefill's there: exact beginnings of prompts. Any deletion of chunks
        deletes all of them, as each may hold what was deleted.
        """
        return fingerprint.behind(head, self.secret, self._namespace)

    def delete_beginnings(self) -> int:
        """Deletes all exact beginnings, see `behind`; how many there were."""
        return self.index.delete_beginnings(self._namespace)

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        """Sorted keys of the chunks of one fingerprint, or of all; not of beginnings."""
        return self.index.keys(self._namespace, fingerprint, are_present=True)

    def same_texts(self, *keys: str) -> set[str]:
        """These keys, and those of all chunks of any fingerprint that have a text of theirs."""
        return self.index.same_texts(self._namespace, keys)

    def known_keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        """Sorted keys of the chunks whose text is known, also without a cache: evicted or lost."""
        return self.index.keys(self._namespace, fingerprint)

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        """The block size for chunks that are like ``fingerprint`` in all else: the first one asked.

        So processes that fill an empty store together agree.
        """
        return self.index.agree(self._block_size_of(fingerprint), size)

    def note(self, name: str) -> str | None:
        """What `put_note` kept under ``name``, None if there is nothing that can be read."""
        raise NotImplementedError

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        """Keeps a short text beside the caches, such as a measurement; whether it was kept.

        name: a file name.
        replace: whether in place of what is there; else the first note stays, also if several
            processes put theirs at once.
        """
        raise NotImplementedError

    def fingerprints(self) -> list[Fingerprint]:
        """The fingerprints of which there is a chunk, sorted by digest; not of beginnings."""
        found = self.index.fingerprints(self._namespace)
        return [made_by for made_by in found if not made_by.is_of_beginning]

    def stats(self) -> StoreStats:
        """What the store holds at this moment."""
        return self._stats(self._namespace)

    def require(self, fingerprint: Fingerprint) -> None:
        """Raises `FingerprintMismatch` if there are chunks, and none of this fingerprint."""
        _require(fingerprint, self.fingerprints(), self._where)

    def elsewhere(self) -> str | None:
        """Where there are caches that look like these, if this namespace has none; None if nowhere.

        In other namespaces of the store, or in a folder beside it.
        """
        return None

    def record(
        self, fingerprint: Fingerprint, *, used: Sequence[str] = (), missed: Sequence[str] = ()
    ) -> None:
        """Takes note of what one prompt held: keys of caches that were there, and that were not.

        Hit rates are made of it, and which caches were used least recently. Best effort: it never
        raises.
        """
        with suppress(StoreError, CacheMiss):
            self.index.record(self._namespace, fingerprint.digest, used, missed)
            if missed:
                self.index.lose([(fingerprint.digest, key) for key in missed])

    def quarantine(self, key: str, fingerprint: Fingerprint) -> None:
        """Deletes a damaged cache; its text stays known.

        The next `put` heals. A chunk that is not there stays away. Best effort: it never raises.
        """
        with suppress(StoreError, CacheMiss):
            self.index.lose([(fingerprint.digest, key)], are_damaged=True)

    def is_evicted(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether a chunk was put, and its cache went for want of room."""
        return self.index.state(fingerprint.digest, key)[0] == EVICTED

    def _block_size_of(self, fingerprint: Fingerprint) -> str:
        """The name of the setting, for chunks that are like this but for the block size."""
        return f"block-size {replace(fingerprint, block_size=1).digest} {self._namespace}"

    def _stats(self, space: str | None) -> StoreStats:
        """What the store holds of a namespace, or of all."""
        made_by = {each.digest: each for each in self.index.fingerprints()}
        counts: dict[FingerprintStats, Counter[str]] = {}
        for namespace, digest, *figures in self.index.totals(space):
            if (known := made_by.get(digest)) is not None:
                row = FingerprintStats(
                    model=known.model, dtype=known.dtype, store_bits=known.store_bits,
                    block_size=known.block_size,
                    prefix=BEHIND_HEADS if known.is_of_beginning else known.prefix,
                    format_version=known.format_version, namespace=namespace, chunks=0, bytes=0,
                )  # fmt: skip
                counts.setdefault(row, Counter()).update(dict(zip(_FIGURES, figures, strict=True)))
        rows = [_counted(row, figures) for row, figures in counts.items()]
        return StoreStats(
            n_chunks=sum(row.chunks for row in rows if row.prefix != BEHIND_HEADS),
            bytes=sum(row.bytes for row in rows), rows=tuple(rows),
            max_bytes=self.index.budget()[0],
        )  # fmt: skip

    def _wanted(
        self, is_wanted: Callable[[str], bool], token_ids: Sequence[Sequence[int]]
    ) -> list[str]:
        """Keys of the chunks to `forget`."""
        texts = self.index.texts(self._namespace)
        named = {
            chunk_key(self.secret, self._namespace, digest, ids)
            for digest in {digest for digest, *_ in texts}
            for ids in token_ids
        }
        # a beginning has no text: whoever deletes anything deletes it along
        return sorted(
            {key for _, key, body in texts if key in named or (body and is_wanted(normalise(body)))}
        )

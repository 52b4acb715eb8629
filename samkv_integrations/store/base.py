"""The contracts: a store of chunk caches, as answers and ingest use it, and opened caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss, StoreError
from samkv_integrations.store.chunk import (
    CacheArray,
    CacheShape,
    ChunkBlocks,
    ChunkCache,
    ChunkRef,
    Fingerprint,
)
from samkv_integrations.store.windows import ChunkIndex

_log = logging.getLogger(__name__)


class StoredChunk(Protocol):
    """One chunk cache, opened for reading; a context manager. For one thread at a time.

    It stays readable after its chunk was deleted or replaced in the store, until `let_go`. Every
    method that reads raises `CacheMiss`: "corrupt" if bytes are missing or fail their MAC, "io" if
    the operating system fails. Text and arrays are read once. They belong to the store: do not
    modify them.

    token_ids: (T,) int32.
    shape: of its arrays, as its file has them.
    size: bytes of all arrays in its file; 0 for a cache in memory.
    bytes_read: so far; from a file, with header and MACs.
    """

    key: str
    fingerprint: Fingerprint
    n_tokens: int
    blocks: ChunkBlocks
    token_ids: NDArray[np.int32]
    shape: CacheShape
    size: int
    bytes_read: int

    def text(self) -> str:
        """The chunk's text."""

    def array(self, name: str) -> CacheArray:
        """An array by its name, see `ChunkCache`. Raises KeyError if there is none of this name."""

    def read_layers(self, first: int, out: Sequence[NDArray[np.uint8]]) -> None:
        """Read the entries of all tokens at the layers from ``first`` on.

        out: contiguous arrays (T, E), one for each layer, which are filled.
        """

    def read_blocks(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Read the entries of ``blocks`` at ``layer``; neighbours in ascending order are one read.

        out: a contiguous array (S, E), which is filled; S is the sum of the blocks' lengths.
        """

    def chunk(self, entries: NDArray[np.uint8] | None = None) -> ChunkCache:
        """The whole cache as it was put, verified.

        entries: (L, T, E), if `read_layers` has read them already.
        """

    def verify(self) -> None:
        """Read everything and check every MAC."""

    def is_current(self) -> bool:
        """Whether the store still has exactly this cache; it may be closed. Nothing is read."""

    def let_go(self) -> None:
        """Keep no file open between reads.

        If the chunk is deleted, evicted or replaced later, reads may raise `CacheMiss` ("absent").
        """

    def close(self) -> None:
        """Close the file and free the memory. No reads afterwards; closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Notes(Protocol):
    """Short texts, by names that are valid as file names.

    where: the folder or URL, or "memory".
    """

    where: str

    def note(self, name: str) -> str | None:
        """The text that `put_note` stored under ``name``; None if there is none to read."""

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        """Store a text; returns whether it was stored. Raises StoreError.

        replace: whether to replace an earlier note. If not, the first of several processes wins.
        """

    def note_place(self, name: str) -> str:
        """The path or URL of a note."""


class Store(Protocol):
    """Chunk caches by key, for answers. A cache that cannot be read raises `CacheMiss`.

    No wrong byte is returned. `text` and what `chunk_index` returns raise `StoreError` if the store
    cannot be used; the other methods do not.

    namespace: part of every key: in another namespace the same text has another key and cache.
    """

    namespace: str

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        """The key of the chunk with these tokens, in this store and namespace."""

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        """An index that finds the chunks of a fingerprint in prompts, by their token ids.

        It also finds known texts whose cache is gone; these count as misses. Its methods raise
        `StoreError` if the store cannot be used.
        """

    def contains(self, key: str, fingerprint: Fingerprint, *, here: bool = False) -> bool:
        """Whether there is a cache. Nothing is read, so opening it may still miss.

        A file that a killed process left unindexed does not count: it is written again.

        here: whether only a cache on this machine counts. Else one in the remote tier counts, too.
            It is fetched when it is opened, and may have been deleted within the last minute.
        """

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        """Begin to fetch, in parallel, caches that only the remote tier has. Best effort."""

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """Open a chunk and verify its identity.

        Raises `CacheMiss`: "absent", "corrupt", "format" (another version of the file format),
        "fingerprint" (of another model, or another chunk), "tokens" (not ``token_ids``), "io".
        """

    def text(self, key: str) -> str | None:
        """The text of a chunk of any fingerprint; None if it is unknown."""

    def record(
        self, fingerprint: Fingerprint, *, used: Sequence[str] = (), missed: Sequence[str] = ()
    ) -> None:
        """Note which chunks of a prompt had a cache, and which had none, by key. Best effort.

        Hit rates and the order of eviction follow from it.
        """

    def quarantine(self, key: str, fingerprint: Fingerprint) -> None:
        """Delete a damaged cache; its text stays known. Best effort."""


class IngestStore(Store, Notes, Protocol):
    """A store to which caches are added, and from which they are deleted.

    Every process sees a change at once. `touch` and `note` never raise `StoreError`; the other
    methods of this class do if the store cannot be used.

    path: the folder; None in memory.
    """

    path: Path | None

    # -- adding caches --------------------------------------------------------------------------

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        """The first caller's block size, for fingerprints that differ in the block size only."""

    def put(self, chunk: ChunkCache, *, unless_deleted_since: int | None = None) -> None:
        """Keep a chunk, in place of one with the same key and fingerprint.

        Atomic: others see either the whole new chunk, or the previous one. Do not modify ``chunk``
        afterwards.

        unless_deleted_since: an earlier value of `deletions`. If something was deleted since, the
            chunk is not kept, and `CacheMiss` ("absent") is raised.
        """

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        """Note that a cache is used now, so that it is evicted later. Best effort."""

    # -- deleting caches --------------------------------------------------------------------------

    def deletions(self) -> int:
        """A number that changes with every deletion in the namespace, by any process."""

    def delete(self, *keys: str) -> int:
        """Delete chunks and their texts under all fingerprints; returns how many existed.

        Raises InvalidOption if a key is not valid.
        """

    def forget(
        self, is_wanted: Callable[[str], bool], token_ids: Sequence[Sequence[int]] = ()
    ) -> int:
        """Delete chunks of this namespace by text, for all models and bits; returns how many.

        Unlike `delete` it also finds texts without a cache, damaged files, and files that killed
        processes left.

        is_wanted: is given the body of each chunk.
        token_ids: of chunks to delete whatever their text, which is unknown if a file is damaged.
        """

    # -- the caches that there are --------------------------------------------------------------

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        """Sorted keys of the chunks with a cache, of one fingerprint or of all."""

    def fingerprints(self) -> list[Fingerprint]:
        """The fingerprints of known chunks, by digest."""

    def elsewhere(self) -> str | None:
        """If the default namespace is empty: namespaces of the store that have caches, in words."""


ShapeOf = Callable[[Fingerprint, int], CacheShape]
"""The arrays that a runtime reads, see `Runtime.cache_shape`."""


def of_shape(stored: StoredChunk, shape: ShapeOf) -> StoredChunk:
    """``stored``. Raises CacheMiss, and closes it, if its arrays are not those that are read."""
    if stored.shape == shape(stored.fingerprint, stored.n_tokens):
        return stored
    stored.close()
    raise CacheMiss("corrupt", f"chunk {stored.key} has other arrays than the model reads")


class ChunkReader:
    """Opens the caches of a store for answers. A runtime may keep hot chunks in memory."""

    def __init__(self, store: Store, shape: ShapeOf) -> None:
        self._store, self._shape = store, shape

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        """As `Store.open`; a cache with other arrays is a miss, too."""
        return of_shape(self._store.open(key, fingerprint, token_ids), self._shape)

    def warm(self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint) -> None:
        """Begin to read chunks that a question will use, in other threads."""

    def bring(self, chunks: Sequence[StoredChunk]) -> None:
        """Begin to copy opened caches to the model's device."""

    def follow(self, deletion: int) -> None:
        """Free caches that were deleted since the last call. deletion: `Chunks.deletions`."""

    def sweep(self) -> None:
        """Free the caches that are no longer in the store."""

    def clear(self) -> None:
        """Free all caches."""


_STORE_FAILS = (
    "the store fails (%s); chunks whose cache cannot be read are computed from their text. This is "
    "said once"
)


class Outage:
    """Logs failures of a store or remote tier that an answer survives.

    Args:
        says: the message, with ``%s`` for the error.
    """

    def __init__(self, says: str = _STORE_FAILS) -> None:
        self._says, self._has_warned = says, False

    @contextmanager
    def survived(self) -> Iterator[None]:
        """A block that a `StoreError` ends; the error is logged, and not raised."""
        try:
            yield
        except StoreError as error:
            self.tell(error)

    def tell(self, error: Exception) -> None:
        """Log a failure: a warning the first time, at DEBUG from then on."""
        is_first, self._has_warned = not self._has_warned, True
        _log.log(logging.WARNING if is_first else logging.DEBUG, self._says, error)

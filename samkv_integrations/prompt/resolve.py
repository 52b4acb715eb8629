"""A prompt whose chunks have been looked up: each has an open cache, or is a counted miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss, ChunkNotCached
from samkv_integrations.option import OnMiss
from samkv_integrations.prompt.layout import PromptChunk
from samkv_integrations.store.base import ChunkReader, Outage, Store, StoredChunk
from samkv_integrations.store.chunk import Fingerprint

MAX_OPEN = 32
"""Files that one prompt keeps open while it waits for the model. Further caches are opened at each
read, so that prompts with many chunks, and many waiting prompts, do not run out of file handles."""


@dataclass(frozen=True, kw_only=True)
class CacheSource:
    """Where the caches of a prompt's chunks come from.

    reader: opens the caches of ``fingerprint``. outage: logs caches that the system cannot read.
    """

    store: Store
    reader: ChunkReader
    fingerprint: Fingerprint
    outage: Outage


@dataclass(kw_only=True)
class Misses:
    """The chunks of a prompt without a usable cache.

    reasons: reason -> number of chunks. keys: of these chunks. bytes_read: of caches that failed.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    keys: list[str] = field(default_factory=list)
    bytes_read: int = 0


@dataclass(kw_only=True)
class Resolved(AbstractContextManager["Resolved"]):
    """The tokens of a prompt and its chunks, in order. Leaving the context closes their caches.

    chunks: of the prompt; `open` looks up their caches in ``source``.
    on_miss: ``error`` raises for a miss; else the tokens of the chunk are computed.
    since: `Chunks.deletions` before the prompt was read; generation: `Runtime.generation` then.
    misses: the chunks that have no cache.
    """

    token_ids: list[int]
    chunks: list[PromptChunk]
    source: CacheSource
    on_miss: OnMiss
    since: int
    generation: int
    misses: Misses = field(default_factory=Misses)
    _found: dict[tuple[int, ...], StoredChunk | CacheMiss] = field(default_factory=dict)
    _behind: int = 0  # the argument of the latest `open`

    @property
    def opened(self) -> list[StoredChunk]:
        """The caches in the order of the chunks; that of a chunk that occurs twice, twice."""
        return [chunk.stored for chunk in self.chunks if chunk.stored is not None]

    @property
    def n_context(self) -> int:
        """Tokens in runs of chunks, with or without a cache."""
        return sum(chunk.n_tokens for chunk in self.chunks)

    @property
    def first_chunk(self) -> int:
        """Position of the first token of a chunk; the prompt's length without one."""
        return self.chunks[0].runs[0].position if self.chunks else len(self.token_ids)

    @cached_property
    def chunk_of_token(self) -> NDArray[np.int64]:
        """(T,) the number of each token's chunk; -1 outside chunks."""
        found = np.full(len(self.token_ids), -1)
        for number, chunk in enumerate(self.chunks):
            for run in chunk.runs:
                found[run.position : run.span.stop] = number
        return found

    def open(self, *, behind: int) -> None:
        """Open the caches of the chunks that reach beyond the first ``behind`` tokens, once each.

        Chunks before that are not looked up.

        Raises ChunkNotCached if ``on_miss`` is ``error`` and one has no usable cache.
        """
        store, made_by, self._behind = self.source.store, self.source.fingerprint, behind
        keys = {
            chunk.token_ids: chunk.key or store.key(made_by, chunk.token_ids)
            for chunk in self.chunks
            if chunk.runs[-1].span.stop > behind and chunk.token_ids not in self._found
        }
        if not keys:
            return
        store.begin_to_fetch(list(keys.values()), made_by)  # in parallel
        for token_ids, key in keys.items():
            try:
                self._found[token_ids] = cache = self.source.reader.open(key, made_by, token_ids)
                if len(self._found) > MAX_OPEN:
                    cache.let_go()
            except CacheMiss as miss:
                if miss.reason == "io":
                    self.source.outage.tell(miss)
                self._found[token_ids] = miss
        for chunk in self.chunks:
            if chunk.token_ids not in keys:
                continue
            chunk.key, found = keys[chunk.token_ids], self._found[chunk.token_ids]
            if isinstance(found, CacheMiss):
                if chunk.text is None or not chunk.is_whole:
                    # an announced text that the prompt holds in part may have been deleted or
                    # changed since then; only the store knows whether it still exists
                    chunk.text = self._text_of(chunk.key)
                self._count_miss(chunk.key, found)
            else:
                chunk.stored = found
        self.source.reader.bring(self.opened)

    def _text_of(self, key: str) -> str | None:
        """The stored text of a chunk that may be computed as a chunk; None without one."""
        if self.on_miss == "compute":
            with self.source.outage.survived():
                return self.source.store.text(key)
        return None

    def _count_miss(self, key: str, miss: CacheMiss, n_places: int = 1) -> None:
        """Count a chunk without a usable cache. Raises ChunkNotCached if that is an error."""
        if miss.is_damage:
            self.source.store.quarantine(key, fingerprint=self.source.fingerprint)
        if self.on_miss == "error":
            raise ChunkNotCached.of(f"chunk {key}", why=miss) from miss
        self.misses.reasons[miss.reason] += n_places
        self.misses.keys.append(key)

    def add_computed(self, made: Mapping[tuple[int, ...], StoredChunk]) -> None:
        """Give missed chunks the caches that have just been computed; ``made``: by token ids."""
        for chunk in self.chunks:
            if chunk.stored is None and (stored := made.get(chunk.token_ids)) is not None:
                chunk.stored, chunk.key = stored, stored.key
                chunk.computed_now = chunk.runs[-1].span.stop > self._behind

    def lose(self, lost: StoredChunk, miss: CacheMiss) -> None:
        """Count a cache that failed while it was read as a miss, wherever its chunk occurs.

        A cache that was computed for this prompt is not computed again: the chunk's tokens are
        computed with the prompt.

        Raises ChunkNotCached if ``on_miss`` is ``error``.
        """
        self.misses.bytes_read += lost.bytes_read
        places = [chunk for chunk in self.chunks if chunk.stored is lost]
        self._count_miss(lost.key, miss, len(places))
        for chunk in places:
            chunk.stored = None
            if chunk.computed_now:
                chunk.text = None
            elif chunk.text is None:
                chunk.text = self._text_of(lost.key)
        lost.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the caches."""
        for stored in set(self.opened):
            stored.close()

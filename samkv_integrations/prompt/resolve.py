"""The chunks in a prompt become open caches, or misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Literal

from samkv_integrations.cache.base import Outage, Store, StoredChunk
from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.errors import CacheMiss, ChunkNotCached, StoreError
from samkv_integrations.prompt.reader import PromptChunk

MAX_HELD = 32
"""Files that one prompt holds open while it waits for the model; of further ones each read opens
its own. A prompt is then answered whatever it names, and many prompts may wait at a time."""

OnMiss = Literal["text", "compute", "error"]


@dataclass
class Resolved(AbstractContextManager["Resolved"]):
    """The tokens of a prompt, and the chunks in it in order; closes their caches on exit.

    store, fingerprint, outage: see `resolve`.
    on_miss: with ``error`` a miss raises; else the tokens of its chunk are computed.
    n_deletions: what `Index.deletions` said before the caches were opened; None if nobody asked.
    misses: reason -> number of chunks without a usable cache. missed: keys of these.
    """

    token_ids: list[int]
    store: Store
    fingerprint: Fingerprint
    outage: Outage
    on_miss: OnMiss = "text"
    chunks: list[PromptChunk] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    n_deletions: int | None = None

    @property
    def opened(self) -> list[StoredChunk]:
        """The caches of the chunks that have one, in order; a chunk may stand there twice."""
        return [chunk.stored for chunk in self.chunks if chunk.stored is not None]

    @property
    def n_context(self) -> int:
        """Tokens in runs of chunks, with or without a cache."""
        return sum(chunk.n_tokens for chunk in self.chunks)

    def text_of(self, key: str) -> str | None:
        """The text of a chunk that is to be computed; None if it is not known, or none is to be."""
        if self.on_miss == "compute":
            with self.outage.survived():
                return self.store.text(key)
        return None

    def add_computed(self, made: Mapping[tuple[int, ...], StoredChunk]) -> None:
        """Answer missed chunks from caches that have just been made, by token ids."""
        for chunk in self.chunks:
            if chunk.stored is None and (stored := made.get(chunk.token_ids)) is not None:
                chunk.stored, chunk.key, chunk.computed_now = stored, stored.key, True

    def lose(self, lost: StoredChunk, miss: CacheMiss) -> None:
        """Make a chunk a missed one wherever this cache of it stands.

        In place of an exact beginning its ordinary cache is taken. One that was made for this
        prompt is not made again, but computed from its tokens.

        Raises ChunkNotCached if ``on_miss`` is ``error``.
        """
        places = [chunk for chunk in self.chunks if chunk.stored is lost]
        if places[0].is_exact:
            if miss.is_damage:
                self.store.quarantine(lost.key, lost.fingerprint)
            (first,) = places
            first.stored, first.is_exact = None, False
            lost.close()
            try:
                first.stored = self.store.open(first.key, self.fingerprint, first.token_ids)
            except CacheMiss as own_miss:
                first.miss, first.text = own_miss.reason, self.text_of(first.key)
                self.count_miss(first.key, own_miss)
            return
        self.count_miss(lost.key, miss, len(places))
        for chunk in places:
            chunk.stored, chunk.miss = None, miss.reason
            if chunk.computed_now:
                chunk.text = None
            elif chunk.text is None:
                chunk.text = self.text_of(lost.key)
        lost.close()

    def open_beginning(self, first: PromptChunk) -> bool:
        """Open the cache that the first chunk has behind the prompt's head; whether it has one."""
        if not first.may_be_exact:
            return False
        made_by = self.store.behind(self.fingerprint, self.token_ids[: first.runs[0].position])
        key = self.store.key(made_by, first.token_ids)
        try:
            first.stored = self.store.open(key, made_by, first.token_ids)
        except CacheMiss as miss:
            if miss.is_damage:
                self.store.quarantine(key, made_by)
            return False
        first.is_exact = True
        return True

    def count_miss(self, key: str, miss: CacheMiss, n_places: int = 1) -> None:
        """Count a chunk without a usable cache. Raises ChunkNotCached if that is an error."""
        if miss.is_damage:
            self.store.quarantine(key, fingerprint=self.fingerprint)
        if self.on_miss == "error":
            raise ChunkNotCached.of(f"chunk {key}", why=miss) from miss
        self.misses[miss.reason] += n_places
        self.missed.append(key)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the caches."""
        for stored in set(self.opened):
            stored.close()


def resolve(
    token_ids: list[int],
    chunks: Sequence[PromptChunk],
    store: Store,
    fingerprint: Fingerprint,
    outage: Outage,
    *,
    on_miss: OnMiss = "text",
    with_beginnings: bool = False,
) -> Resolved:
    """A prompt that was read, with the caches of its chunks open.

    with_beginnings: whether the first chunk's is the one made behind the prompt's head, if any.
    outage: told of caches that the operating system does not give.

    Raises ChunkNotCached if ``on_miss`` is ``error`` and a chunk has no usable cache.
    """
    resolved = Resolved(token_ids, store, fingerprint, outage, on_miss)
    if with_beginnings:
        with suppress(StoreError):
            resolved.n_deletions = store.index.deletions(store.namespace)
    opened: dict[str, StoredChunk | CacheMiss] = {}
    keys: dict[tuple[int, ...], str] = {}
    for chunk in chunks:
        if chunk.token_ids not in keys:
            keys[chunk.token_ids] = chunk.key or store.key(fingerprint, chunk.token_ids)
        chunk.key = keys[chunk.token_ids]
    store.begin_to_fetch(list(keys.values()), fingerprint)  # together, not each when it is opened
    try:
        for chunk in chunks:
            key = chunk.key
            resolved.chunks.append(chunk)
            if with_beginnings and chunk is chunks[0] and resolved.open_beginning(chunk):
                continue
            cache = opened.get(key)
            if cache is None:  # a file is opened once, in however many places its chunk is
                try:
                    cache = store.open(key, fingerprint, chunk.token_ids)
                    if len(opened) >= MAX_HELD:
                        cache.let_go()
                except CacheMiss as miss:
                    if miss.reason == "io":
                        outage.tell(miss)
                    cache = miss
                opened[key] = cache
            if isinstance(cache, CacheMiss):
                chunk.miss = cache.reason
                if chunk.text is None or not chunk.is_whole:
                    # An announced text that the prompt holds in part may be one that was deleted,
                    # or changed since; the store knows those that were not.
                    chunk.text = resolved.text_of(key)
                resolved.count_miss(key, cache)
            else:
                chunk.stored = cache
    except BaseException:
        resolved.close()
        raise
    return resolved

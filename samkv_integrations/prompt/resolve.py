"""The chunks in a prompt become open caches, or misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, Self

from samkv_integrations.cache.base import Outage, Store, StoredChunk
from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.errors import CacheMiss, ChunkNotCached
from samkv_integrations.prompt.layout import ChunkPart
from samkv_integrations.prompt.reader import ReadPrompt
from samkv_integrations.prompt.runs import Run

MAX_HELD = 32
"""Files that one prompt holds open while it waits for the model; of further ones each read opens
its own. A prompt is then answered whatever it names, and many prompts may wait at a time."""

OnMiss = Literal["text", "compute", "error"]


@dataclass
class PromptChunk:
    """A chunk in a prompt: the runs of its token ids that the prompt holds, and its cache.

    key: of its cache. token_ids: of all of it. text: its body, None if it is not known.
    stored: its cache; None if there is none that can be used. miss: why not.
    computed_now: whether the cache was made for this very prompt.
    """

    key: str
    token_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    text: str | None
    stored: StoredChunk | None = None
    miss: str | None = None
    computed_now: bool = False

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt that are in its runs."""
        return sum(map(len, self.runs))

    @property
    def part(self) -> ChunkPart:
        blocks = None if self.stored is None else self.stored.blocks
        return ChunkPart(runs=self.runs, blocks=blocks)


@dataclass
class Resolved:
    """The tokens of a prompt, and the chunks in it in order; closes their caches on exit.

    on_miss: with ``error`` a miss raises; else the tokens of its chunk are computed.
    misses: reason -> number of chunks without a usable cache. missed: keys of these.
    quarantine: told the keys of damaged caches. text_of: the text of a chunk that is to be
    computed, by key; None if it is not known, or if none is to be.
    """

    token_ids: list[int]
    on_miss: OnMiss = "text"
    chunks: list[PromptChunk] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    quarantine: Callable[[str], None] = lambda key: None
    text_of: Callable[[str], str | None] = lambda key: None

    @property
    def parts(self) -> list[ChunkPart]:
        """What the prompt holds of each chunk, with or without a cache."""
        return [chunk.part for chunk in self.chunks]

    @property
    def opened(self) -> list[StoredChunk]:
        """The caches of the chunks that have one, in order; a chunk may stand there twice."""
        return [chunk.stored for chunk in self.chunks if chunk.stored is not None]

    @property
    def n_context(self) -> int:
        """Tokens in runs of chunks, with or without a cache."""
        return sum(chunk.n_tokens for chunk in self.chunks)

    @property
    def missed_texts(self) -> dict[tuple[int, ...], str]:
        """Of the chunks that have no cache and may be computed as chunks, by token ids."""
        missed = (chunk for chunk in self.chunks if chunk.stored is None)
        return {chunk.token_ids: chunk.text for chunk in missed if chunk.text is not None}

    @property
    def used(self) -> list[str]:
        """Keys of the caches that were there before the prompt, each once."""
        used = (chunk for chunk in self.chunks if chunk.stored and not chunk.computed_now)
        return list(dict.fromkeys(chunk.key for chunk in used))

    @property
    def bytes_read(self) -> int:
        """Of all caches that are open."""
        return sum(chunk.bytes_read for chunk in set(self.opened))

    def add_computed(self, made: Mapping[tuple[int, ...], StoredChunk]) -> None:
        """Answer missed chunks from caches that have just been made, by token ids."""
        for chunk in self.chunks:
            if chunk.stored is None and (stored := made.get(chunk.token_ids)) is not None:
                chunk.stored, chunk.key, chunk.computed_now = stored, stored.key, True

    def lose(self, index: int, miss: CacheMiss) -> None:
        """Make cached chunk ``index``, as counted in `opened`, a missed one wherever it stands.

        One that was made for this prompt is not made again, but computed from its tokens.

        Raises ChunkNotCached if ``on_miss`` is ``error``.
        """
        lost = self.opened[index]
        places = [chunk for chunk in self.chunks if chunk.stored is lost]
        self.count_miss(lost.key, miss, len(places))
        for chunk in places:
            chunk.stored, chunk.miss = None, miss.reason
            if chunk.computed_now:
                chunk.text = None
            elif chunk.text is None:
                chunk.text = self.text_of(lost.key)
        lost.close()

    def count_miss(self, key: str, miss: CacheMiss, n_places: int = 1) -> None:
        """Count a chunk without a usable cache. Raises ChunkNotCached if that is an error."""
        if miss.is_damage:
            self.quarantine(key)
        if self.on_miss == "error":
            raise ChunkNotCached.of(f"chunk {key}", why=miss) from miss
        self.misses[miss.reason] += n_places
        self.missed.append(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the caches."""
        for stored in set(self.opened):
            stored.close()


def resolve(
    prompt: ReadPrompt,
    store: Store,
    fingerprint: Fingerprint,
    outage: Outage,
    *,
    on_miss: OnMiss = "text",
) -> Resolved:
    """The prompt with the caches of its chunks open.

    outage: told of caches that the operating system does not give.

    Raises ChunkNotCached if ``on_miss`` is ``error`` and a chunk has no usable cache.
    """

    def text_of(key: str) -> str | None:
        if on_miss == "compute":
            with outage.survived():
                return store.text(key)
        return None

    resolved = Resolved(
        token_ids=prompt.token_ids,
        on_miss=on_miss,
        quarantine=partial(store.quarantine, fingerprint=fingerprint),
        text_of=text_of,
    )
    keys = {
        chunk.token_ids: chunk.key or store.key(fingerprint, chunk.token_ids)
        for chunk in prompt.chunks
    }
    opened: dict[str, StoredChunk | CacheMiss] = {}
    store.begin_to_fetch(list(keys.values()), fingerprint)  # together, not each when it is opened
    try:
        for found in prompt.chunks:
            key = keys[found.token_ids]
            chunk = PromptChunk(key, found.token_ids, found.runs, found.text)
            resolved.chunks.append(chunk)
            cache = opened.get(key)
            if cache is None:  # a file is opened once, in however many places its chunk is
                cache = opened[key] = _open(store, key, fingerprint, found.token_ids, outage)
                if not isinstance(cache, CacheMiss) and len(opened) > MAX_HELD:
                    cache.let_go()
            if isinstance(cache, CacheMiss):
                chunk.miss = cache.reason
                if chunk.text is None:
                    chunk.text = text_of(key)
                resolved.count_miss(key, cache)
            else:
                chunk.stored = cache
    except BaseException:
        resolved.close()
        raise
    return resolved


def _open(
    store: Store,
    key: str,
    fingerprint: Fingerprint,
    token_ids: Sequence[int],
    outage: Outage,
) -> StoredChunk | CacheMiss:
    try:
        return store.open(key, fingerprint, token_ids)
    except CacheMiss as miss:
        if miss.reason == "io":
            outage.tell(miss)
        return miss

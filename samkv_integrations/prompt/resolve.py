"""A split prompt becomes segments with token ids, and chunks become open caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Literal, Self

from samkv_integrations.cache.base import Store, StoredChunk
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.cache.outage import Outage
from samkv_integrations.errors import CacheMiss, ChunkNotCached, InvalidOption
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Segment
from samkv_integrations.prompt.split import ChunkText, Piece, PlainText

MAX_HELD = 32
"""Files that one prompt holds open while it waits for the model; of further ones each read opens
its own. A prompt is then answered whatever it names, and many prompts may wait at a time."""

OnMiss = Literal["text", "compute", "error"]


@dataclass
class Resolved:
    """Segments of a prompt and the open caches of those that are cached chunks, in order.

    on_miss: with ``error`` a miss raises; else its chunk becomes text.
    opened: a chunk that stands in several places is there as often, opened once.
    misses: reason -> number of chunks without a usable cache; a chunk that is ``rewritten`` has no
    segment of its own. missed: keys of the others. texts: of chunks, by token ids.
    quarantine: told the keys of damaged caches. Closes the caches on exit.
    """

    on_miss: OnMiss = "text"
    segments: list[Segment] = field(default_factory=list)
    opened: list[StoredChunk] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    quarantine: Callable[[str], None] = lambda key: None

    @property
    def missed_texts(self) -> dict[tuple[int, ...], str]:
        """Of the chunks that have no cache and may be computed as chunks, by token ids."""
        missed = (each for each in self.segments if each.is_context and each.blocks is None)
        return {
            each.token_ids: self.texts[each.token_ids]
            for each in missed
            if each.token_ids in self.texts
        }

    @property
    def used(self) -> list[str]:
        """Keys of the caches that were there before the prompt, each once."""
        cached = (segment for segment in self.segments if segment.blocks is not None)
        found = zip(self.opened, cached, strict=True)
        return list(dict.fromkeys(chunk.key for chunk, each in found if not each.computed_now))

    @property
    def bytes_read(self) -> int:
        """Of all caches that are open."""
        return sum(chunk.bytes_read for chunk in set(self.opened))

    def add_computed(self, chunks: Mapping[tuple[int, ...], StoredChunk]) -> None:
        """Answer missed chunks from caches that have just been made, by token ids."""
        before = iter(self.opened)
        self.opened = []
        for at, segment in enumerate(self.segments):
            if segment.blocks is not None:
                self.opened.append(next(before))
            elif segment.is_context and segment.token_ids in chunks:
                stored = chunks[segment.token_ids]
                self.opened.append(stored)
                self.segments[at] = replace(segment, blocks=stored.blocks, computed_now=True)
        assert next(before, None) is None

    def mark_computed(self, chunks: Container[tuple[int, ...]]) -> None:
        """Say of chunks, by token ids, that their caches were made for this prompt."""
        self.segments = [
            replace(segment, computed_now=True)
            if segment.is_context and segment.token_ids in chunks
            else segment
            for segment in self.segments
        ]

    @property
    def context_spans(self) -> list[range]:
        """Positions of each chunk's tokens in the prompt, with or without a cache."""
        ends = list(accumulate(len(segment.token_ids) for segment in self.segments))
        return [
            range(end - len(segment.token_ids), end)
            for segment, end in zip(self.segments, ends, strict=True)
            if segment.is_context
        ]

    def lose(self, index: int, miss: CacheMiss) -> None:
        """Make cached chunk ``index`` a missed one, wherever it stands.

        One that was made for this prompt is not made again, but computed from its tokens.

        Raises ChunkNotCached if ``on_miss`` is ``error``.
        """
        lost = self.opened[index]
        cached = [at for at, segment in enumerate(self.segments) if segment.blocks is not None]
        places = [at for at, chunk in zip(cached, self.opened, strict=True) if chunk is lost]
        self.count_miss(lost.key, miss, len(places))
        for at in places:
            segment = self.segments[at]
            self.segments[at] = replace(segment, blocks=None)
            if segment.computed_now:
                self.texts.pop(segment.token_ids, None)
        self.opened = [chunk for chunk in self.opened if chunk is not lost]
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
        for chunk in set(self.opened):
            chunk.close()


class Resolver:
    """Turns a prompt string into segments with token ids, and chunks into open caches.

    outage: told of caches that the operating system does not give.
    """

    def __init__(
        self, model: Model, store: Store, fingerprint: Fingerprint, outage: Outage
    ) -> None:
        self._model = model
        self._store = store
        self._fingerprint = fingerprint
        self._outage = outage

    def resolve(
        self, pieces: Sequence[Piece], *, on_miss: OnMiss = "text", n_rewritten: int = 0
    ) -> Resolved:
        """Segments of a split prompt, which begin with BOS exactly once if the model has one.

        n_rewritten: chunks that plain text holds in a changed form, which count as misses.

        Raises ChunkNotCached if ``on_miss`` is ``error`` and a chunk has no usable cache.
        """
        resolved = Resolved(
            on_miss=on_miss,
            misses=+Counter(rewritten=n_rewritten),
            quarantine=partial(self._store.quarantine, fingerprint=self._fingerprint),
        )
        found: dict[tuple[int, ...], StoredChunk | CacheMiss] = {}
        try:
            tokenised = [(piece, self._ids_of(piece)) for piece in pieces]
            self._begin_to_fetch({ids for piece, ids in tokenised if isinstance(piece, ChunkText)})
            for piece, ids in tokenised:
                if isinstance(piece, PlainText):
                    resolved.segments.append(Segment(token_ids=ids))
                    continue
                if ids not in found:  # a file is opened once, in however many places it is named
                    resolved.texts[ids] = piece.text
                    found[ids] = self._open(ids, is_held=len(found) < MAX_HELD)
                self._add_chunk(resolved, ids, found[ids])
        except BaseException:
            resolved.close()
            raise
        self._begin_with_bos(resolved)
        return resolved

    def count_tokens(self, pieces: Sequence[Piece]) -> int:
        """Tokens of a split prompt; no cache is opened."""
        counted = Resolved()
        for piece in pieces:
            is_context = not isinstance(piece, PlainText)
            counted.segments.append(Segment(token_ids=self._ids_of(piece), is_context=is_context))
        self._begin_with_bos(counted)
        return sum(len(segment.token_ids) for segment in counted.segments)

    def _begin_to_fetch(self, chunks: Collection[tuple[int, ...]]) -> None:
        """Those of a remote tier come together, and not each when it is opened."""
        self._store.begin_to_fetch([self._key(ids) for ids in chunks], self._fingerprint)

    def _key(self, ids: tuple[int, ...]) -> str:
        return self._store.key(self._fingerprint, ids)

    def _ids_of(self, piece: Piece) -> tuple[int, ...]:
        if isinstance(piece, PlainText):
            return tuple(self._model.tokenize_prompt(piece.prompt))
        return tuple(self._model.tokenize(piece.text, special=False))

    def _begin_with_bos(self, resolved: Resolved) -> None:
        bos, segments = self._model.bos_id, resolved.segments
        first = segments[0] if segments else None
        if bos is None:
            if not any(segment.token_ids for segment in segments):
                raise InvalidOption("the prompt is empty; it must hold at least one token")
        elif first is None or first.is_context:
            segments.insert(0, Segment(token_ids=(bos,)))
        elif first.token_ids[:1] != (bos,):
            segments[0] = Segment(token_ids=(bos, *first.token_ids))

    def _open(self, ids: tuple[int, ...], *, is_held: bool) -> StoredChunk | CacheMiss:
        key = self._key(ids)
        try:
            stored = self._store.open(key, self._fingerprint, ids)
            if not is_held:
                stored.let_go()
            return stored
        except CacheMiss as miss:
            if miss.reason == "io":
                self._outage.tell(miss)
            return miss

    def _add_chunk(
        self, resolved: Resolved, ids: tuple[int, ...], found: StoredChunk | CacheMiss
    ) -> None:
        if isinstance(found, CacheMiss):
            resolved.count_miss(self._key(ids), found)
            resolved.segments.append(Segment(token_ids=ids, is_context=True))
        else:
            resolved.opened.append(found)
            resolved.segments.append(Segment(token_ids=ids, blocks=found.blocks, is_context=True))

"""A split prompt becomes segments with token ids, and chunks become open caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import TracebackType
from typing import Literal, Self

from samkv_integrations.cache.base import Store, StoredChunk
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.errors import CacheMiss, ChunkNotCached, InvalidOption
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Segment
from samkv_integrations.prompt.split import ChunkText, Piece, PlainText

OnMiss = Literal["text", "compute", "error"]


@dataclass
class Resolved:
    """Segments of a prompt and the open caches of those that are cached chunks, in order.

    on_miss: with ``error`` a miss raises; else its chunk becomes text.
    misses: reason -> number of chunks without a usable cache; a chunk that is ``rewritten`` has no
    segment of its own. missed_texts: those of the others, by token ids. Closes the caches on exit.
    """

    on_miss: OnMiss = "text"
    segments: list[Segment] = field(default_factory=list)
    opened: list[StoredChunk] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    missed_texts: dict[tuple[int, ...], str] = field(default_factory=dict)

    def add_computed(self, chunks: Mapping[tuple[int, ...], Callable[[], StoredChunk]]) -> None:
        """Answer missed chunks from caches that have just been made, by token ids."""
        before = iter(self.opened)
        self.opened = []
        for at, segment in enumerate(self.segments):
            if segment.blocks is not None:
                self.opened.append(next(before))
            elif segment.is_context and segment.token_ids in chunks:
                stored = chunks[segment.token_ids]()
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
        """Make cached chunk ``index`` a chunk that is computed from its tokens.

        Raises ChunkNotCached if ``on_miss`` is ``error``.
        """
        self.count_miss(self.opened[index].key, miss)
        cached = [i for i, segment in enumerate(self.segments) if segment.blocks is not None]
        at = cached[index]
        self.segments[at] = replace(self.segments[at], blocks=None)
        self.opened.pop(index).close()

    def count_miss(self, key: str, miss: CacheMiss) -> None:
        """Count a chunk without a usable cache. Raises ChunkNotCached if that is an error."""
        if self.on_miss == "error":
            raise ChunkNotCached.of(f"chunk {key}", why=miss) from miss
        self.misses[miss.reason] += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for chunk in self.opened:
            chunk.close()


class Resolver:
    """Turns a prompt string into segments with token ids, and chunks into open caches."""

    def __init__(self, model: Model, store: Store, fingerprint: Fingerprint) -> None:
        self._model = model
        self._store = store
        self._fingerprint = fingerprint

    def resolve(
        self, pieces: Sequence[Piece], *, on_miss: OnMiss = "text", n_rewritten: int = 0
    ) -> Resolved:
        """Segments of a split prompt, which begin with BOS exactly once if the model has one.

        n_rewritten: chunks that plain text holds in a changed form, which count as misses.

        Raises ChunkNotCached if ``on_miss`` is ``error`` and a chunk has no usable cache.
        """
        resolved = Resolved(on_miss=on_miss, misses=+Counter(rewritten=n_rewritten))
        try:
            for piece in pieces:
                if isinstance(piece, PlainText):
                    resolved.segments.append(Segment(token_ids=self._ids_of(piece)))
                else:
                    self._add_chunk(resolved, piece)
        except BaseException:
            resolved.__exit__(None, None, None)
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

    def _add_chunk(self, resolved: Resolved, piece: ChunkText) -> None:
        ids = self._ids_of(piece)
        key = self._store.key(self._fingerprint, ids)
        try:
            stored = self._store.open(key, self._fingerprint, ids)
        except CacheMiss as miss:
            resolved.count_miss(key, miss)
            resolved.missed_texts[ids] = piece.text
            resolved.segments.append(Segment(token_ids=ids, is_context=True))
            return
        resolved.opened.append(stored)
        resolved.segments.append(Segment(token_ids=ids, blocks=stored.blocks, is_context=True))

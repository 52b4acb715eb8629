"""The segmenter: a prompt string becomes plain text and chunks before it is tokenised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import TracebackType
from typing import Literal, Self, get_args

from samkv_integrations.chunk import Fingerprint, is_in_word, normalise
from samkv_integrations.errors import CacheMiss, ChunkNotCached, HandleError, InvalidOption
from samkv_integrations.layout import Segment
from samkv_integrations.model import Model
from samkv_integrations.store import Store, StoredChunk

OnMiss = Literal["text", "compute", "error"]

_HANDLE = re.compile(r"\[\[samkv:([0-9a-f]{32})\]\]")
_FRAGMENT = re.compile(r"\[\[samk|samkv:[0-9a-f]*\]\]")
# Hex digits and brackets that no bracket opened: the end of a handle, if a key ends so.
_TAIL = re.compile(r"(?<![0-9a-f\[])([0-9a-f]{8,32})\]\]")


_CHAT_TEMPLATE = "Documents:\n\n{context}\n\nQuestion: {question}"
_RAG_TEMPLATE = f"{_CHAT_TEMPLATE}\nAnswer:"


def rag_prompt(
    question: str, documents: Sequence[str], *, chat: bool = False
) -> str | list[dict[str, str]]:
    """The prompt that the command line and the benchmarks ask with.

    documents: bodies or handles of chunks. chat: as one user message, for a chat template; it ends
    with the question, because there the answer is the assistant's turn.
    """
    context = "\n\n".join(documents)
    if chat:
        content = _CHAT_TEMPLATE.format(context=context, question=question)
        return [{"role": "user", "content": content}]
    return _RAG_TEMPLATE.format(context=context, question=question)


def handle_of(key: str) -> str:
    """The handle that stands for chunk ``key`` in a prompt."""
    return f"[[samkv:{key}]]"


@dataclass(frozen=True)
class PlainText:
    """Text that is computed at query time."""

    text: str


@dataclass(frozen=True)
class ChunkText:
    """The body of a chunk, found as text."""

    text: str


@dataclass(frozen=True)
class ChunkHandle:
    """A chunk, found as a handle."""

    key: str


Piece = PlainText | ChunkText | ChunkHandle


def bodies_of(texts: Sequence[str]) -> list[str]:
    """The bodies of chunks, see `normalise`. Raises InvalidOption for what are no texts."""
    if isinstance(texts, str):
        raise InvalidOption(f"one text was given for chunks ({texts[:40]!r}); put it into a list")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidOption(f"chunk {text!r} is no text; chunks must be strings")
    return [normalise(text) for text in texts]


def split_prompt(
    prompt: str,
    chunks: Sequence[str] = (),
    known: Mapping[str, str] | None = None,
    ends_a_key: Callable[[str], bool] = lambda digits: False,
) -> list[Piece]:
    """Split ``prompt`` at handles, at the bodies of ``chunks``, and at ``known`` texts.

    known: written form -> body, see `KnownTexts`; found where it stands alone. Of two that begin in
        one place the longer wins.
    ends_a_key: whether a stored key ends with these hex digits.

    What stands inside a chunk body is never looked at, so a document cannot smuggle a handle in.

    Raises:
        InvalidOption: a chunk is empty or does not occur in the prompt.
        HandleError: the plain text holds a piece of a handle that something cut in two.
    """
    bodies = dict.fromkeys(bodies_of(chunks))
    if "" in bodies:
        raise InvalidOption("an empty chunk was given; chunks must hold text")
    forms = {**(known or {}), **{body: body for body in bodies}}
    places: list[tuple[int, int, Piece]] = [
        (match.start(), match.end(), ChunkHandle(match[1])) for match in _HANDLE.finditer(prompt)
    ]
    for form, body in forms.items():
        for at in _occurrences(prompt, form):
            end = at + len(form)
            if form in bodies or not (is_in_word(prompt, at) or is_in_word(prompt, end)):
                places.append((at, end, ChunkText(body)))
    pieces: list[Piece] = []
    end = 0
    for start, stop, piece in sorted(places, key=lambda place: (place[0], -place[1])):
        if start >= end:
            _add_plain(pieces, prompt[end:start], ends_a_key)
            pieces.append(piece)
            end = stop
    _add_plain(pieces, prompt[end:], ends_a_key)
    found = {piece.text for piece in pieces if isinstance(piece, ChunkText)}
    for body in bodies:
        if body not in found and not any(body in longer for longer in found):
            raise InvalidOption(
                f"chunk {_shorten(body)!r} does not occur in the prompt; put the text of every "
                "chunk (or its handle) where the model should read it"
            )
    return pieces


def _occurrences(prompt: str, form: str) -> Iterator[int]:
    at = prompt.find(form)
    while at >= 0:
        yield at
        at = prompt.find(form, at + 1)


def _add_plain(pieces: list[Piece], text: str, ends_a_key: Callable[[str], bool]) -> None:
    if not text:
        return
    tails = (tail for tail in _TAIL.finditer(text) if ends_a_key(tail[1]))
    if fragment := _FRAGMENT.search(text) or next(tails, None):
        raise HandleError(
            f"the prompt holds a broken handle near {_shorten(text[fragment.start() :])!r}; "
            "something cut it: raise the context window of the prompt builder, or pass the text"
        )
    pieces.append(PlainText(text))


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass
class Resolved:
    """Segments of a prompt and the open caches of those that are cached chunks, in order.

    on_miss: see `Resolver.resolve`. misses: reason -> number of chunks without a usable cache.
    missed_texts: theirs, by token ids.
    computed: tokens of each missed chunk that was then computed as a chunk. Closes the caches on
    exit.
    """

    on_miss: OnMiss = "text"
    segments: list[Segment] = field(default_factory=list)
    opened: list[StoredChunk] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    missed_texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    computed: list[int] = field(default_factory=list)

    def add_computed(self, chunks: Mapping[tuple[int, ...], Callable[[], StoredChunk]]) -> None:
        """Answer missed chunks from caches that have just been made, by token ids."""
        opened, before = self.opened, iter(self.opened)
        self.opened = []
        for at, segment in enumerate(self.segments):
            if segment.blocks is not None:
                self.opened.append(next(before))
            elif segment.is_context and segment.token_ids in chunks:
                stored = chunks[segment.token_ids]()
                self.opened.append(stored)
                self.computed.append(stored.n_tokens)
                self.segments[at] = replace(segment, blocks=stored.blocks)
        assert len(opened) + len(self.computed) == len(self.opened)

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
        if self.on_miss == "error":
            raise not_cached(self.opened[index].key, miss) from miss
        cached = [i for i, segment in enumerate(self.segments) if segment.blocks is not None]
        at = cached[index]
        self.segments[at] = Segment(token_ids=self.segments[at].token_ids, is_context=True)
        self.opened.pop(index).close()
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


def not_cached(key: str, miss: CacheMiss) -> ChunkNotCached:
    """What is raised for a chunk without a usable cache where it must have one."""
    return ChunkNotCached(
        f"chunk {key} has no usable cache ({miss}); ingest it again, or pass on_miss='text' or "
        "'compute'"
    )


class Resolver:
    """Turns a prompt string into segments with token ids, and chunks into open caches."""

    def __init__(self, model: Model, store: Store, fingerprint: Fingerprint) -> None:
        self._model = model
        self._store = store
        self._fingerprint = fingerprint

    def resolve(self, pieces: Sequence[Piece], *, on_miss: OnMiss = "text") -> Resolved:
        """Segments of a split prompt, which begin with BOS exactly once if the model has one.

        Raises:
            HandleError: a handle names no chunk whose text is known.
            ChunkNotCached: ``on_miss`` is ``error`` and a chunk has no usable cache.
        """
        if on_miss not in get_args(OnMiss):
            raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")
        resolved = Resolved(on_miss=on_miss)
        try:
            for piece in pieces:
                if isinstance(piece, PlainText):
                    ids = tuple(self._model.tokenize(piece.text, special=True))
                    resolved.segments.append(Segment(token_ids=ids))
                else:
                    self._add_chunk(resolved, piece, on_miss)
        except BaseException:
            resolved.__exit__(None, None, None)
            raise
        self._begin_with_bos(resolved)
        return resolved

    def count_tokens(self, prompt: str) -> int:
        """Tokens of ``prompt``, handles at the length of their chunks; no cache is opened."""
        counted = Resolved()
        for piece in split_prompt(prompt, ends_a_key=self.ends_a_key):
            ids = (
                self._ids_behind(piece.key)
                if isinstance(piece, ChunkHandle)
                else tuple(self._model.tokenize(piece.text, special=True))
            )
            counted.segments.append(
                Segment(token_ids=ids, is_context=isinstance(piece, ChunkHandle))
            )
        self._begin_with_bos(counted)
        return sum(len(segment.token_ids) for segment in counted.segments)

    def ends_a_key(self, digits: str) -> bool:
        """Whether the key of a stored chunk ends with these hex digits."""
        return any(key.endswith(digits) for key in self._store.keys(self._fingerprint))

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

    def _add_chunk(
        self, resolved: Resolved, piece: ChunkText | ChunkHandle, on_miss: OnMiss
    ) -> None:
        if isinstance(piece, ChunkHandle):
            key, ids = piece.key, self._ids_behind(piece.key)
        else:
            ids = tuple(self._model.tokenize(piece.text, special=False))
            key = self._store.key(self._fingerprint, ids)
        try:
            stored = self._store.open(key, self._fingerprint, ids)
        except CacheMiss as miss:
            if on_miss == "error":
                raise not_cached(key, miss) from miss
            resolved.misses[miss.reason] += 1
            if (text := self._text_of(piece)) is not None:
                resolved.missed_texts[ids] = text
            resolved.segments.append(Segment(token_ids=ids, is_context=True))
            return
        resolved.opened.append(stored)
        resolved.segments.append(Segment(token_ids=ids, blocks=stored.blocks, is_context=True))

    def _text_of(self, piece: ChunkText | ChunkHandle) -> str | None:
        return piece.text if isinstance(piece, ChunkText) else self._store.text(piece.key)

    def _ids_behind(self, key: str) -> tuple[int, ...]:
        """Token ids that a handle stands for: of its text, else of its cache.

        Either must hash to the key in this namespace and for this model; so a handle of another
        tenant or a changed text is refused, not read.
        """
        if (text := self._store.text(key)) is not None:
            ids = tuple(self._model.tokenize(text, special=False))
            if self._store.key(self._fingerprint, ids) == key:
                return ids
        with suppress(CacheMiss), self._store.open(key, self._fingerprint) as stored:
            ids = tuple(stored.token_ids.tolist())
            if self._store.key(self._fingerprint, ids) == key:
                return ids
        raise HandleError(
            f"handle {handle_of(key)} names no chunk of this store, model and namespace; ingest "
            "its text again, or pass the text instead of the handle"
        )

"""Where chunks stand in a prompt string that holds them as plain text, without handles."""

from __future__ import annotations

import heapq
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from samkv_integrations.cache.bare import (
    LOOKUP_CHARS,
    Bare,
    Written,
    bare_form,
    is_written_as,
    lined,
    spaced,
)
from samkv_integrations.cache.base import Beginnings, Store
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.cache.outage import Outage
from samkv_integrations.cache.text_index import TextIndex
from samkv_integrations.errors import InvalidOption, StoreError
from samkv_integrations.prompt.text import bodies_of, is_in_word, shorten

MAX_EXPECTED = 4096

_BEGINNING = re.compile(r"(?<![^\W_])\S|[^\w\s]|_")  # in a bare form: no space, not within a word

_MAX_FORMS = 32
"""Stored texts that are tried in one place of a prompt: each begins as the longer one before it."""

_MAX_ALIKE = 16
"""Bodies with one bare form that are tried in one place of a prompt."""


@dataclass(frozen=True)
class Span:
    """Where a chunk stands in a prompt string, ``[start, stop)``, and its body."""

    start: int
    stop: int
    body: str


def find_given(prompt: str, chunks: Sequence[str], handles: Sequence[Span] = ()) -> list[Span]:
    """The bodies of ``chunks`` in ``prompt``; where two overlap, the earlier or longer one.

    One that is nowhere as it is may be written otherwise, see `Bare`.

    handles: where handles stand, which are found too.

    Raises InvalidOption if a chunk is empty or does not occur.
    """
    bodies = list(dict.fromkeys(bodies_of(chunks)))
    if "" in bodies:
        raise InvalidOption("an empty chunk was given; chunks must hold text")

    def rank(span: Span) -> tuple[int, int, bool]:
        written = prompt[span.start : span.stop]
        return span.start, -span.stop, not is_written_as(span.body, written, lined)

    places = sorted([*handles, *_occurrences(prompt, bodies)], key=rank)
    spans: list[Span] = []
    end = 0
    for span in places:
        if span.start >= end:
            end = span.stop
            spans.append(span)
    found = {span.body for span in spans}
    for body in bodies:
        if body not in found and not any(body in longer for longer in found):
            raise InvalidOption(
                f"chunk {shorten(body)!r} does not occur in the prompt; put the text of every "
                "chunk (or its handle) where the model should read it"
            )
    return spans


def _occurrences(prompt: str, bodies: Sequence[str]) -> Iterator[Span]:
    """Where bodies stand as they are; one that nowhere does, where it is written otherwise."""
    bare: Bare | None = None
    for body in bodies:
        places = _all_of(body, prompt)
        if places:
            yield from (Span(at, at + len(body), body) for at in places)
        elif form := Bare(body).text.strip():
            bare = bare or Bare(prompt)
            for at in _all_of(form, bare.text):
                start, stop = bare.start(at), bare.stop(at + len(form))
                if is_written_as(body, prompt[start:stop]):
                    yield Span(start, stop, body)


def _all_of(text: str, prompt: str) -> list[int]:
    """Where ``text`` begins in ``prompt``, each place."""
    places = []
    at = prompt.find(text)
    while at >= 0:
        places.append(at)
        at = prompt.find(text, at + 1)
    return places


@dataclass(frozen=True)
class _Source:
    """Where texts come from.

    heads: how they begin. longest: characters of the longest. like: see `Store.texts_like`.
    """

    heads: Collection[str]
    longest: int
    like: Callable[[str], Iterator[tuple[str, list[str]]]]


class _Heads:
    """How the texts of a source begin, kept up to date from one look to the next."""

    def __init__(self) -> None:
        self._of: Hashable = None
        self._cursor: Hashable | None = None
        self._heads: set[str] = set()

    def update(
        self, of: Hashable, ask: Callable[[Hashable | None], Beginnings]
    ) -> tuple[set[str], int]:
        """The heads, and how long the longest text is; of: what they are of, all new if another."""
        new = ask(self._cursor if of == self._of else None)
        if new.is_all:  # others may be looking into what was there
            self._heads = set(new.heads)
        else:
            self._heads.update(new.heads)
        self._of, self._cursor = of, new.cursor
        return self._heads, new.longest


class KnownTexts:
    """Finds the bodies of stored chunks in prompts, however they are written there, see `Bare`.

    Only how texts begin is kept in memory, `LOOKUP_CHARS` characters of each. Where a prompt holds
    such a beginning, the store is asked. What any process adds or deletes is noticed at the next
    prompt. Texts of other namespaces are not found. Safe to use from many threads: a prompt is
    searched without a lock, in time that grows with its length, and with the beginnings in it times
    the logarithm of the number of texts.

    Args:
        fingerprint: that of the chunks to find, which may change until the first is stored.
        key_of: the key that a text has in this namespace.
        outage: told when the store fails.
    """

    def __init__(
        self,
        store: Store,
        fingerprint: Callable[[], Fingerprint],
        key_of: Callable[[str], str],
        outage: Outage | None = None,
    ) -> None:
        self._outage = outage or Outage()
        self._store = store
        self._fingerprint = fingerprint
        self._key_of = key_of
        self._lock = threading.Lock()
        self._stored_heads, self._expected_heads = _Heads(), _Heads()
        self._expected: OrderedDict[str, None] = OrderedDict()  # bodies, oldest first
        self._index = TextIndex()  # of the expected ones

    def expect(self, texts: Sequence[str]) -> None:
        """Find these texts too, stored or not: the latest `MAX_EXPECTED` of them.

        One without a cache then counts as a chunk that is missing, and not as any text.
        """
        with self._lock:
            for body in map(normalise, texts):
                self._index.add(body, None)
                self._expected[body] = None
                self._expected.move_to_end(body)
            while len(self._expected) > MAX_EXPECTED:
                self._index.remove(self._expected.popitem(last=False)[0], None)

    def forget(self, texts: Sequence[str]) -> None:
        """Expect none of these texts; those in the store are found as before."""
        with self._lock:
            for body in map(normalise, texts):
                self._expected.pop(body, None)
                self._index.remove(body, None)

    def is_kept(self, body: str) -> bool:
        """Whether the store has a text or a cache of it: it was not deleted, as far as it says."""
        key, store = self._key_of(body), self._store
        with self._outage.survived():
            return store.text(key) is not None or store.contains(key, self._fingerprint())
        return True

    def find(self, prompt: str) -> list[Span]:
        """Where they stand in ``prompt``; of two that begin in one place the longer.

        A body must stand alone: one that begins or ends within a word is not found. Of those with
        one bare form the one that is written there as it is, or in these lines, else any.

        If the store fails, only expected texts are found.
        """
        sources = self._sources()
        if not any(source.heads for source in sources):
            return []
        bare = Bare(prompt)
        text, stored, expected = bare.text, *(source.heads for source in sources)
        found: list[Span] = []
        end = 0
        for beginning in _BEGINNING.finditer(text):
            if (at := beginning.start()) < end:
                continue
            head = text[at : at + LOOKUP_CHARS]
            if head in stored or head in expected:
                if (here := _span_at(prompt, bare, at, sources)) is not None:
                    span, end = here
                    found.append(span)
        return found

    def _sources(self) -> tuple[_Source, _Source]:
        """What the store has, and what is expected."""
        store = self._store
        with self._lock:
            heads, longest = self._expected_heads.update(None, self._index.beginnings)
            expected = _Source(heads, longest, self._index.texts_like)
            try:
                made_by = self._fingerprint()
                heads, longest = self._stored_heads.update(
                    made_by.digest, lambda since: store.beginnings(made_by, since)
                )
            except StoreError as error:
                self._outage.tell(error)
                return _Source((), 0, self._index.texts_like), expected

        has_failed = False

        def like(bare: str) -> Iterator[tuple[str, list[str]]]:
            nonlocal has_failed
            if has_failed:  # it may have taken its time to fail
                return
            try:
                yield from store.texts_like(made_by, bare)
            except StoreError as error:
                has_failed = True
                self._outage.tell(error)

        return _Source(heads, longest, like), expected


def _span_at(
    prompt: str, bare: Bare, at: int, sources: Sequence[_Source]
) -> tuple[Span, int] | None:
    """What begins at place ``at`` of the bare prompt, and where it ends there; the longest."""
    for form, bodies in islice(_forms_at(bare.text, at, sources), _MAX_FORMS):
        end = at + len(form)
        if is_in_word(bare.text, end):
            continue
        start, stop = bare.start(at), bare.stop(end)
        tried = bodies[:_MAX_ALIKE]
        for body in tried:
            begins = start - _lead(body)
            if begins >= 0 and prompt.startswith(body, begins):
                return Span(begins, begins + len(body), body), end
        written = Written(prompt[start:stop])
        # code that is indented otherwise is other code, and has the same bare form
        for alike in (lined, spaced) if len(tried) > 1 else (spaced,):
            for body in tried:
                if written.may_be(body, alike):
                    return Span(start, stop, body), end
    return None


def _lead(body: str) -> int:
    """Characters of a body before its bare form, see `bare_form`."""
    return bare_form(body)[1] if body[0] in "\\&" else 0  # what escapes begin with


def _forms_at(text: str, at: int, sources: Sequence[_Source]) -> Iterator[tuple[str, list[str]]]:
    """The bare forms of texts that begin at a place of a bare text, the longest first."""
    head = text[at : at + LOOKUP_CHARS]
    found = (
        source.like(text[at : at + source.longest]) for source in sources if head in source.heads
    )
    merged = heapq.merge(*found, key=lambda pair: -len(pair[0]))
    for form, alike in groupby(merged, key=lambda pair: pair[0]):
        yield form, list(dict.fromkeys(body for _, bodies in alike for body in bodies))

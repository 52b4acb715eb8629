"""Where chunks stand in a prompt string that holds them as plain text, without handles."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from samkv_integrations.cache.bare import (
    LOOKUP_CHARS,
    Bare,
    bare_form,
    is_written_as,
    lined,
    spaced,
)
from samkv_integrations.cache.base import Store
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.text import bodies_of, is_in_word, shorten

MAX_EXPECTED = 4096

_BEGINNING = re.compile(r"(?<![^\W_])\S|[^\w\s]|_")  # in a bare form: no space, not within a word

_EXPECTED = "expected"  # a source of a body; the others are keys, which are hex


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


class KnownTexts:
    """Finds the bodies of stored chunks in prompts, however they are written there, see `Bare`.

    The store's texts are read at the first prompt and kept in memory; what any process adds or
    deletes is noticed at the next one. Texts of other namespaces are not found. Safe to use from
    many threads.

    Args:
        fingerprint: that of the chunks to find, which may change until the first is stored.
        key_of: the key that a text has in this namespace.
    """

    def __init__(
        self,
        store: Store,
        fingerprint: Callable[[], Fingerprint],
        key_of: Callable[[str], str],
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._key_of = key_of
        self._lock = threading.Lock()
        self._stamp: tuple[str, Hashable] | None = None
        self._stored: dict[str, str] = {}  # key -> body
        self._expected: OrderedDict[str, None] = OrderedDict()  # bodies, oldest first
        self._sources: dict[str, set[str]] = {}  # body -> keys that it may have, or _EXPECTED
        self._ours: set[str] = set()  # bodies that are known to be of this namespace
        # first characters -> bare form -> body -> characters of the body before it
        self._index: dict[str, dict[str, dict[str, int]]] = {}

    def expect(self, texts: Sequence[str]) -> None:
        """Find these texts too, stored or not: the latest `MAX_EXPECTED` of them.

        One without a cache then counts as a chunk that is missing, and not as any text.
        """
        with self._lock:
            for body in map(normalise, texts):
                self._add(body, _EXPECTED)
                self._expected[body] = None
                self._expected.move_to_end(body)
            while len(self._expected) > MAX_EXPECTED:
                self._remove(self._expected.popitem(last=False)[0], _EXPECTED)

    def forget(self, texts: Sequence[str]) -> None:
        """Hold none of these texts in memory; those in the store are read again."""
        with self._lock:
            for body in map(normalise, texts):
                self._expected.pop(body, None)
                for source in list(self._sources.get(body, ())):
                    self._stored.pop(source, None)
                    self._remove(body, source)
            self._stamp = None

    def is_kept(self, body: str) -> bool:
        """Whether the store has a text or a cache of it: it was not deleted."""
        key, store = self._key_of(body), self._store
        return store.text(key) is not None or store.contains(key, self._fingerprint())

    def find(self, prompt: str) -> list[Span]:
        """Where they stand in ``prompt``; of two that begin in one place the longer.

        A body must stand alone: one that begins or ends within a word is not found. Of those with
        one bare form the one that is written there as it is, or in these lines, else any.

        Raises:
            StoreError: the store cannot be listed.
        """
        bare = Bare(prompt)
        with self._lock:
            self._refresh()
            found: list[Span] = []
            end = 0
            for beginning in _BEGINNING.finditer(bare.text):
                at = beginning.start()
                if at < end or bare.text[at : at + LOOKUP_CHARS] not in self._index:
                    continue
                if (here := self._at(prompt, bare, at)) is not None:
                    span, end = here
                    found.append(span)
            return found

    def _at(self, prompt: str, bare: Bare, at: int) -> tuple[Span, int] | None:
        """What begins at place ``at`` of the bare prompt, and where it ends there; the longest."""
        forms = self._index[bare.text[at : at + LOOKUP_CHARS]]
        for form in sorted(forms, key=len, reverse=True):
            end = at + len(form)
            if not bare.text.startswith(form, at) or is_in_word(bare.text, end):
                continue
            start, stop = bare.start(at), bare.stop(end)
            ours = [(body, lead) for body, lead in list(forms[form].items()) if self._is_ours(body)]
            for body, lead in ours:
                if prompt.startswith(body, start - lead):
                    return Span(start - lead, start - lead + len(body), body), end
            # code that is indented otherwise is other code, and has the same bare form
            for alike in (lined, spaced) if len(ours) > 1 else (spaced,):
                for body, _ in ours:
                    if is_written_as(body, prompt[start:stop], alike):
                        return Span(start, stop, body), end
        return None

    def _is_ours(self, body: str) -> bool:
        """Whether this namespace has the body; forgets what belongs to another one."""
        if body not in self._ours and body in self._sources:
            for key in self._sources[body] - {_EXPECTED, self._key_of(body)}:
                self._remove(body, key)
            if body in self._sources:
                self._ours.add(body)
        return body in self._ours

    def _refresh(self) -> None:
        fingerprint = self._fingerprint()
        stamp = self._store.stamp(fingerprint)
        if stamp is not None and (fingerprint.digest, stamp) == self._stamp:
            return
        held = set(self._store.keys(fingerprint))
        for key in self._stored.keys() - held:
            self._remove(self._stored.pop(key), key)
        for key in held - self._stored.keys():
            if (text := self._store.text(key)) is not None:
                self._stored[key] = normalise(text)
                self._add(self._stored[key], key)
        self._stamp = (fingerprint.digest, stamp)

    def _add(self, body: str, source: str) -> None:
        sources = self._sources.setdefault(body, set())
        sources.add(source)
        self._ours.discard(body)
        if len(sources) == 1:
            form, lead = bare_form(body)
            if len(form) >= LOOKUP_CHARS:
                forms = self._index.setdefault(form[:LOOKUP_CHARS], {})
                forms.setdefault(form, {})[body] = lead

    def _remove(self, body: str, source: str) -> None:
        sources = self._sources.get(body, set())
        sources.discard(source)
        self._ours.discard(body)
        if sources or body not in self._sources:
            return
        del self._sources[body]
        form, _ = bare_form(body)
        forms = self._index.get(form[:LOOKUP_CHARS], {})
        bodies = forms.get(form, {})
        bodies.pop(body, None)
        if not bodies:
            forms.pop(form, None)
        if not forms:
            self._index.pop(form[:LOOKUP_CHARS], None)

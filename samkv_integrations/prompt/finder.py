"""Where chunks stand in a prompt string that holds them as plain text, without handles."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.text import bodies_of, is_in_word, shorten

LOOKUP_CHARS = 24
"""Characters at the beginning of a body by which it is looked up; a shorter body is not found."""

MAX_EXPECTED = 4096

_EXPECTED = "expected"  # a source of a body; the others are keys, which are hex


@dataclass(frozen=True)
class Span:
    """Where a chunk stands in a prompt string, ``[start, stop)``, and its body."""

    start: int
    stop: int
    body: str


def find_given(prompt: str, chunks: Sequence[str], handles: Sequence[Span] = ()) -> list[Span]:
    """The bodies of ``chunks`` in ``prompt``; where two overlap, the earlier or longer one.

    handles: where handles stand, which are found too.

    Raises InvalidOption if a chunk is empty or does not occur.
    """
    bodies = list(dict.fromkeys(bodies_of(chunks)))
    if "" in bodies:
        raise InvalidOption("an empty chunk was given; chunks must hold text")
    places = sorted(
        [*handles, *_occurrences(prompt, bodies)], key=lambda span: (span.start, -span.stop)
    )
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
    for body in bodies:
        at = prompt.find(body)
        while at >= 0:
            yield Span(at, at + len(body), body)
            at = prompt.find(body, at + 1)


class KnownTexts:
    """Finds the bodies of stored chunks in prompts, as they are or as templates escape them.

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
        self._index: dict[str, dict[str, str]] = {}  # first characters -> form -> body

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

    def find(self, prompt: str) -> list[Span]:
        """Where they stand in ``prompt``; of two that begin in one place the longer.

        A body must stand alone: one that begins or ends within a word is not found.

        Raises:
            StoreError: the store cannot be listed.
        """
        with self._lock:
            self._refresh()
            found: list[Span] = []
            at, last = 0, len(prompt) - LOOKUP_CHARS
            while at <= last:
                form = self._form_at(prompt, at)
                if form is None:
                    at += 1
                else:
                    body = self._index[form[:LOOKUP_CHARS]][form]
                    found.append(Span(at, at + len(form), body))
                    at += len(form)
            return found

    def _form_at(self, prompt: str, at: int) -> str | None:
        forms = self._index.get(prompt[at : at + LOOKUP_CHARS])
        if forms is None or is_in_word(prompt, at):
            return None
        for form, body in sorted(forms.items(), key=lambda item: len(item[0]), reverse=True):
            is_there = prompt.startswith(form, at) and not is_in_word(prompt, at + len(form))
            if is_there and self._is_ours(body):
                return form
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
        for form in _forms(body):
            forms = self._index.setdefault(form[:LOOKUP_CHARS], {})
            if form == body or form not in forms:
                forms[form] = body

    def _remove(self, body: str, source: str) -> None:
        sources = self._sources.get(body, set())
        sources.discard(source)
        self._ours.discard(body)
        if sources or body not in self._sources:
            return
        del self._sources[body]
        for form in _forms(body):
            forms = self._index.get(form[:LOOKUP_CHARS], {})
            if forms.get(form) == body:
                del forms[form]
            if not forms:
                self._index.pop(form[:LOOKUP_CHARS], None)


def _forms(body: str) -> list[str]:
    """How ``body`` may be written in a prompt: as it is, inside the ``repr`` of something, in HTML.

    A template that is given a list of texts writes their ``repr``; which quotes are escaped then
    depends on the whole of it. Mustache, Jinja and Python's `html` write quotes differently.
    """
    escaped = repr(f'"{body}')[2:-1]  # with both kinds of quotes in it repr escapes the single ones
    html = escape(body, quote=False)
    quotes = (("&quot;", "'"), ("&quot;", "&#x27;"), ("&#34;", "&#39;"), ('"', "'"))
    in_html = (html.replace('"', double).replace("'", single) for double, single in quotes)
    forms = (body, escaped, escaped.replace("\\'", "'"), *in_html)
    return [form for form in dict.fromkeys(forms) if len(form) >= LOOKUP_CHARS]

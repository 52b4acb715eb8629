"""The bare form of a text: the same however a template or an encoder writes the text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from html import unescape
from textwrap import dedent

LOOKUP_CHARS = 24
"""Characters at the beginning of a bare form that are looked up; a shorter one is not found."""

_ESCAPE = re.compile(
    r"[&\\](?:"  # one set to begin with, which makes the search for it fast
    # & is &amp; in HTML, once for each escaping of the text
    r"(?:(?<=&)|\\*+(?:u0026|x26))(?:amp;)*+"
    r"(?:(?P<lt>lt;)|(?P<gt>gt;)|(?P<double>quot;|#34;|#x22;)|(?P<single>apos;|#39;|#x27;))?"
    # characters by number: UTF-16 as in JSON, or 2, 4 or 8 digits as in `repr`
    r"|\\*+u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\++u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\*+(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|U(?P<U>000[0-9a-fA-F]{5}))"
    r"|\\*+(?P<space>[nrtf])"
    r"|\\*+)"  # before a quote or a slash, or doubled
)
_WHITE_SPACE = re.compile(r" \s++|[^\S ]\s*+")  # all but one space alone, which stays
_NAMED = {"lt": "<", "gt": ">", "double": '"', "single": "'", "space": " "}


_BACKSLASHED = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(000[0-9a-fA-F]{5})|([nrtfb\"'/\\]))"
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}
_MOST_ENCODINGS = 6


def spaced(text: str) -> str:
    """The text with one space for every run of white space."""
    return " ".join(text.split())


def lined(text: str) -> str:
    """The text with its lines as they are, but for how far all after the first are indented."""
    first, *rest = [line.rstrip() for line in text.splitlines()] or [""]
    return f"{first}\n{dedent(chr(10).join(rest))}"


class Written:
    r"""A text as somebody wrote it, escaped or not: which bodies it may be.

    Escapes are those of JSON, `repr` and HTML, at most `_MOST_ENCODINGS` of them in turn.

    Equal bare forms are not enough: a text about ``\d+`` is none about ``d+``.
    """

    def __init__(self, written: str) -> None:
        self._written = written
        self._forms: dict[Callable[[str], str], set[str]] = {}

    def may_be(self, body: str, form: Callable[[str], str] = spaced) -> bool:
        """Whether it is ``body``, but for white space.

        form: what both are compared by: `spaced`, or `lined`, which tells blocks of code apart.
        """
        if form(self._written) == (wanted := form(body)):
            return True
        if form not in self._forms:
            self._forms[form] = set(map(form, self._decoded))
        return wanted in self._forms[form]

    @cached_property
    def _decoded(self) -> set[str]:
        """The text itself, and what it says if it is escaped."""
        texts, new = {self._written}, {self._written}
        for _ in range(_MOST_ENCODINGS):
            new = {decode(text) for text in new for decode in (unescape, _without_backslashes)}
            new -= texts
            if not new:
                break
            texts |= new
        return texts


def is_written_as(body: str, written: str, form: Callable[[str], str] = spaced) -> bool:
    """Whether ``written`` is ``body``, escaped or not, but for white space; see `Written`."""
    return Written(written).may_be(body, form)


def _without_backslashes(text: str) -> str:
    decoded = _BACKSLASHED.sub(
        lambda m: _LETTERS.get(m[4], m[4]) if m[4] else chr(int(m[1] or m[2] or m[3], 16)), text
    )
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs


def bare_form(body: str) -> tuple[str, int]:
    """The bare form of a body, and how much of the body comes before it: escapes, if anything."""
    bare = Bare(body)
    form = bare.text.strip()
    return form, bare.start(bare.text.index(form)) if form else 0


class Bare:
    r"""A text without its escapes, and with one space for every run of white space.

    Escapes are those of JSON, of `repr` and of HTML, to any depth. A text, its JSON, the JSON of
    that, its lines indented or wrapped elsewhere: all have one bare form. So the form is coarse: a
    literal ``\n`` and a line break are the same in it, and backslashes are no part of it. Whoever
    wants to tell such texts from each other compares them as they are written.

    Takes time in proportion to the text.
    """

    def __init__(self, written: str) -> None:
        self._escapes = _Replaced(written, _ESCAPE, _unescaped)
        self._runs = _Replaced(self._escapes.text, _WHITE_SPACE, lambda _: " ")
        self.text = self._runs.text

    def start(self, at: int) -> int:
        """Where character ``at`` of the bare form begins in the text as it is written."""
        return self._escapes.start(self._runs.start(at))

    def stop(self, at: int) -> int:
        """Where the character before ``at``, 1 or more, ends in the text as it is written."""
        return self._escapes.stop(self._runs.stop(at))


class _Replaced:
    """A text in which every match of a pattern is replaced, and where its characters come from."""

    def __init__(
        self, text: str, pattern: re.Pattern[str], by: Callable[[re.Match[str]], str]
    ) -> None:
        pieces: list[str] = []
        self._at: list[int] = []  # where replacements begin
        self._from: list[tuple[int, int, int]] = []  # their end; start and stop of what they are of
        before = size = 0
        for match in pattern.finditer(text):
            kept, new = text[before : match.start()], by(match)
            size += len(kept)
            self._at.append(size)
            size += len(new)
            self._from.append((size, *match.span()))
            pieces += (kept, new)
            before = match.end()
        pieces.append(text[before:])
        self.text = "".join(pieces)

    def start(self, at: int) -> int:
        end, start, stop = self._last(at)
        return start if at < end else stop + at - end

    def stop(self, at: int) -> int:
        end, _, stop = self._last(at - 1)
        return stop + max(at - end, 0)

    def _last(self, at: int) -> tuple[int, int, int]:
        """The last replacement that begins at ``at`` or before."""
        number = bisect_right(self._at, at)
        return self._from[number - 1] if number else (0, 0, 0)


def _unescaped(escape: re.Match[str]) -> str:
    kind, named = escape.lastgroup, escape[0]
    if kind is None:
        return "" if named[0] == "\\" and named[-1] == "\\" else "&"
    if kind in _NAMED:
        return _NAMED[kind]
    if kind == "low":
        high, low = int(escape["high"], 16), int(escape["low"], 16)
        return chr(0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00)
    number = int(escape[kind], 16)
    return "" if number == ord("\\") else chr(number)

"""A prompt string becomes pieces: plain text, chunks as text, chunks as handles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samkv_integrations.errors import HandleError
from samkv_integrations.prompt.finder import Span
from samkv_integrations.prompt.text import HANDLE, shorten

_FRAGMENT = re.compile(r"\[\[samk|samkv:[0-9a-f]*\]\]")
# Hex digits and brackets that no bracket opened: the end of a handle, if a key ends so.
_TAIL = re.compile(r"(?<![0-9a-f\[])([0-9a-f]{8,32})\]\]")


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


def split_prompt(
    prompt: str,
    spans: Sequence[Span] = (),
    ends_a_key: Callable[[str], bool] = lambda digits: False,
) -> list[Piece]:
    """Cut ``prompt`` at handles and at ``spans``.

    ends_a_key: whether a stored key ends with these hex digits.

    What stands inside a chunk body is never looked at, so a document cannot smuggle a handle in.

    Raises HandleError if the plain text holds a piece of a handle that something cut in two.
    """
    places: list[tuple[int, int, Piece]] = [
        (match.start(), match.end(), ChunkHandle(match[1])) for match in HANDLE.finditer(prompt)
    ]
    places += [(span.start, span.stop, ChunkText(span.body)) for span in spans]
    pieces: list[Piece] = []
    end = 0
    for start, stop, piece in sorted(places, key=lambda place: (place[0], -place[1])):
        if start >= end:
            _add_plain(pieces, prompt[end:start], ends_a_key)
            pieces.append(piece)
            end = stop
    _add_plain(pieces, prompt[end:], ends_a_key)
    return pieces


def _add_plain(pieces: list[Piece], text: str, ends_a_key: Callable[[str], bool]) -> None:
    if not text:
        return
    tails = (tail for tail in _TAIL.finditer(text) if ends_a_key(tail[1]))
    if fragment := _FRAGMENT.search(text) or next(tails, None):
        raise HandleError(
            f"the prompt holds a broken handle near {shorten(text[fragment.start() :])!r}; "
            "something cut it: raise the context window of the prompt builder, or pass the text"
        )
    pieces.append(PlainText(text))

"""A prompt string becomes pieces: plain text, chunks as text, chunks as handles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from samkv_integrations.errors import HandleError, InvalidOption
from samkv_integrations.prompt.text import bodies_of, is_in_word

_HANDLE = re.compile(r"\[\[samkv:([0-9a-f]{32})\]\]")


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

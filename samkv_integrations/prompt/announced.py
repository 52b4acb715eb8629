"""Chunks that were announced and that a prompt holds in a changed form only: they are misses."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from samkv_integrations.cache.bare import LOOKUP_CHARS, Bare
from samkv_integrations.errors import ChunkNotCached
from samkv_integrations.prompt.resolve import OnMiss
from samkv_integrations.prompt.split import ChunkText, Piece, PlainText
from samkv_integrations.prompt.text import shorten

MAX_PENDING = 256

STRETCH = 40
"""Letters and digits in a row, some 8 words, that a prompt and a chunk share only if the one was
made of the other. A question that quotes a name or a title has fewer."""

_PART = STRETCH // 2

_REMEDY = (
    "let the prompt hold the text as it was stored, or the chunk's handle "
    "(a mode of SamKVPostprocessor and of SamKVDocumentCompressor)"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ForNext:
    """What was announced for the next prompt, which empties it; `Announced` that it is of."""

    of: Announced
    bodies: list[str]


# A context and not a thread: pools lend one thread to many requests.
_FOR_NEXT: ContextVar[_ForNext | None] = ContextVar("samkv_for_next_prompt", default=None)


class Announced:
    """The latest announced chunks that no prompt has held yet, `MAX_PENDING` of them.

    A prompt need not hold all that a retriever found: a reranker drops some, and a synthesizer may
    spread them over several prompts. So a chunk counts as changed only if the prompt, outside of
    the chunks that were found in it, holds a stretch of it. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: OrderedDict[str, str] = OrderedDict()  # bodies -> their letters
        self._held: OrderedDict[str, str] = OrderedDict()  # those that a prompt has held
        self._has_warned = False

    def add(self, bodies: Sequence[str], *, for_next_prompt: bool = False) -> None:
        """Wait for these chunks. Those too short to be found as text are not waited for.

        for_next_prompt: whether the next prompt of this context is to hold some of them.
        """
        bare = {body: Bare(body).text for body in bodies}
        new = {body: _letters(form) for body, form in bare.items() if len(form) >= LOOKUP_CHARS}
        with self._lock:
            for body, letters in new.items():
                self._pending[body] = letters
                self._pending.move_to_end(body)
                self._held.pop(body, None)  # by an earlier prompt: it does not excuse this one
            while len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
        if for_next_prompt and new:
            _FOR_NEXT.set(_ForNext(self, list(new)))

    def count(self, pieces: Sequence[Piece], on_miss: OnMiss) -> int:
        """How many of them a prompt, cut into pieces, holds in a changed form; warns once.

        All that were announced for this prompt count if it holds none of them in any form. What is
        counted, or is there as it was stored, is not waited for any longer.

        Raises ChunkNotCached if ``on_miss`` is ``error`` and a chunk is there in a changed form.
        """
        with self._lock:
            announced = self._for_this_prompt()
            if not self._pending:
                return 0
            found = {piece.text for piece in pieces if isinstance(piece, ChunkText)}
            for body in found:
                self._hold(body)
            plain = [piece.text for piece in pieces if isinstance(piece, PlainText)]
            missing = self._changed(plain)
            if missing and on_miss == "error":
                raise ChunkNotCached(
                    f"chunk {shorten(missing[0])!r} was retrieved, but the prompt holds it in a "
                    f"changed form, which has no cache; {_REMEDY}, or use on_miss='text'"
                )
            if not any(self._is_there(body, found, missing) for body in announced):
                missing += announced
            for body in missing:
                del self._pending[body]
            is_first = bool(missing) and not self._has_warned
            self._has_warned |= is_first
        if is_first:
            _log.warning(
                "%d chunks were retrieved, but the prompt does not hold them as they were stored, "
                "so their caches are not used; %s. Such chunks are misses with the reason "
                "'rewritten'; this is said once, and at DEBUG which chunks",
                len(missing), _REMEDY,
            )  # fmt: skip
        for body in missing:
            _log.debug("chunk %r is not in the prompt as it was stored", shorten(body))
        return len(missing)

    def forget(self, bodies: Collection[str]) -> None:
        """Wait for these no longer."""
        with self._lock:
            for body in bodies:
                self._pending.pop(body, None)
                self._held.pop(body, None)

    def _hold(self, body: str) -> None:
        """Take note that a prompt holds a body; the latest are remembered."""
        if (letters := self._pending.pop(body, None)) is not None:
            self._held[body] = letters
        if body in self._held:
            self._held.move_to_end(body)
        while len(self._held) > MAX_PENDING:
            self._held.popitem(last=False)

    def _changed(self, plain: Sequence[str]) -> list[str]:
        """Pending bodies of which these parts of a prompt hold a stretch.

        One that a body has too that was held says nothing: neighbours in a document may overlap,
        and an answer that was made of the one is refined by the other.
        """
        if not self._pending:
            return []
        letters = "\n".join(_letters(Bare(text).text) for text in plain)
        parts = {part for its in self._pending.values() for part in _parts(its)}
        parts = _windows(letters, _PART, parts)
        stretches = {body: _stretches(its, parts) for body, its in self._pending.items()}
        shared = _held_by(letters, {each for its in stretches.values() for each in its})
        if shared:
            shared -= _held_by("\n".join(self._held.values()), shared)
        return [body for body, its in stretches.items() if not shared.isdisjoint(its)]

    def _for_this_prompt(self) -> list[str]:
        """What was announced for it, once."""
        announcement = _FOR_NEXT.get()
        if announcement is None or announcement.of is not self:
            return []
        bodies = list(announcement.bodies)
        announcement.bodies.clear()
        return bodies

    def _is_there(self, body: str, found: Collection[str], changed: Collection[str]) -> bool:
        """Whether a prompt holds a body in any form, or another one did in the meantime."""
        held = body not in self._pending or any(body in text for text in found)
        return held or body in changed


def _letters(bare: str) -> str:
    """The letters and digits of a bare form, in lower case."""
    return re.sub(r"[\W_]+", "", bare.lower())


def _parts(letters: str) -> list[str]:
    """A text in parts; each of its stretches holds one of them as a whole."""
    return [letters[at : at + _PART] for at in range(0, len(letters) - _PART + 1, _PART)]


def _windows(letters: str, size: int, wanted: Collection[str]) -> set[str]:
    """What a text holds of ``wanted``, of ``size`` characters each, in one pass for all."""
    return {
        window
        for at in range(len(letters) - size + 1)
        if (window := letters[at : at + size]) in wanted
    }


def _stretches(letters: str, parts: Collection[str]) -> set[str]:
    """The stretches of a text that hold one of its ``parts``; all of it, if it is no longer."""
    last = max(0, len(letters) - STRETCH)
    starts = {
        start
        for number, part in enumerate(_parts(letters))
        if part in parts
        for start in range(max(0, number * _PART - _PART), min(number * _PART, last) + 1)
    }
    return {letters[start : start + STRETCH] for start in starts}


def _held_by(letters: str, stretches: Collection[str]) -> set[str]:
    """Those of ``stretches`` that a text holds."""
    if not stretches:
        return set()
    short = {each for each in stretches if len(each) < STRETCH and each in letters}
    return short | _windows(letters, STRETCH, stretches)

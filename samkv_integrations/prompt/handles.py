"""Handles: what stands for the text of a chunk in a prompt, if it was issued for that."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from samkv_integrations.errors import HandleError
from samkv_integrations.prompt.text import shorten

LIFETIME_S = 3600.0
"""Seconds for which a handle stands for its chunk."""

MAX_ISSUED = 16_384
"""Handles that are remembered at a time; the oldest are forgotten first."""

_HANDLE = re.compile(r"\[\[samkv:([0-9a-f]{32})\]\]")
# What a cut leaves of a handle, with enough digits to know whose it was.
_HEAD = re.compile(r"\[\[samkv:([0-9a-f]{8,32})(?![0-9a-f]|\]\])")
_TAIL = re.compile(r"(?<!\[\[samkv:)(?<![0-9a-f])([0-9a-f]{8,32})\]\]")
_DIGITS = 8  # by which such a piece is looked up

_log = logging.getLogger(__name__)


def is_handle(text: str) -> bool:
    """Whether ``text`` is a handle and nothing else, whoever wrote it."""
    return _HANDLE.fullmatch(text) is not None


@dataclass(frozen=True)
class Span:
    """Where a handle stands in a prompt string, ``[start, stop)``, and the body of its chunk."""

    start: int
    stop: int
    body: str


@dataclass(frozen=True)
class _Issued:
    body: str
    until_s: float


class Handles:
    """The handles that one engine has issued, and the bodies of chunks that they stand for.

    A handle is a random name, new each time, and no key: who may read a chunk has been asked before
    a handle of it is issued, and who was not shown it cannot name it. Whatever else looks like a
    handle in a prompt is text. Safe to use from many threads.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._issued: OrderedDict[str, _Issued] = OrderedDict()  # by name, oldest first
        self._beginning: dict[str, set[str]] = {}  # first digits -> names
        self._ending: dict[str, set[str]] = {}  # last digits -> names
        self._has_warned = False

    def issue(self, body: str) -> str:
        """A new handle that stands for ``body``, for `LIFETIME_S`."""
        name = secrets.token_hex(16)
        with self._lock:
            self._drop_old()
            self._issued[name] = _Issued(body, self._clock() + LIFETIME_S)
            self._beginning.setdefault(name[:_DIGITS], set()).add(name)
            self._ending.setdefault(name[-_DIGITS:], set()).add(name)
            while len(self._issued) > MAX_ISSUED:
                self._drop(next(iter(self._issued)))
        return f"[[samkv:{name}]]"

    def find(self, prompt: str) -> list[Span]:
        """Where issued handles stand in ``prompt``, and what they stand for."""
        spans: list[Span] = []
        unknown: list[str] = []
        with self._lock:
            self._drop_old()
            for match in _HANDLE.finditer(prompt):
                if issued := self._issued.get(match[1]):
                    spans.append(Span(match.start(), match.end(), issued.body))
                else:
                    unknown.append(match[0])
            is_first = bool(unknown) and not self._has_warned
            self._has_warned |= is_first
        if is_first:
            _log.warning(
                "a handle stands in a prompt and is read as text: this engine has not issued it "
                "within %d minutes. If a prompt builder put it there, have the documents retrieved "
                "again, or prompt with their text; this is said once, and at DEBUG which handles",
                LIFETIME_S // 60,
            )
        for handle in unknown:
            _log.debug("%s is read as text", handle)
        return spans

    def require_whole(self, text: str) -> None:
        """Raises HandleError if ``text`` holds a piece of an issued handle, which something cut."""
        with self._lock:
            for match in (*_HEAD.finditer(text), *_TAIL.finditer(text)):
                part = match[1]
                if match.re is _HEAD:
                    names = self._beginning.get(part[:_DIGITS], ())
                    is_piece = any(name.startswith(part) for name in names)
                else:
                    names = self._ending.get(part[-_DIGITS:], ())
                    is_piece = any(name.endswith(part) for name in names)
                if is_piece:
                    raise HandleError(
                        f"the prompt holds a handle that something cut, near "
                        f"{shorten(text[match.start() :])!r}; raise the context window of the "
                        "prompt builder, or prompt with the text of the chunk"
                    )

    def require_live(self, text: str) -> None:
        """Raises HandleError if ``text`` holds an issued handle, of a chunk that is no more."""
        with self._lock:
            if any(match[1] in self._issued for match in _HANDLE.finditer(text)):
                raise HandleError(
                    "the prompt holds the handle of a chunk that has been deleted since it was "
                    "issued, or whose model has changed; retrieve again"
                )

    def forget(self, bodies: Collection[str]) -> None:
        """Let no handle stand for ``bodies`` any more."""
        with self._lock:
            for name in [n for n, issued in self._issued.items() if issued.body in bodies]:
                self._drop(name)

    def _drop(self, name: str) -> None:
        del self._issued[name]
        for names, digits in ((self._beginning, name[:_DIGITS]), (self._ending, name[-_DIGITS:])):
            names[digits].discard(name)
            if not names[digits]:
                del names[digits]

    def _drop_old(self) -> None:
        now = self._clock()
        while self._issued and next(iter(self._issued.values())).until_s <= now:
            self._drop(next(iter(self._issued)))

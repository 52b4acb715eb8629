"""Handles: short random names that stand for chunks in a prompt."""

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
from samkv_integrations.prompt.rag_template import shorten

_log = logging.getLogger(__name__)

LIFETIME_S = 3600.0
"""Seconds for which a handle is valid."""

MAX_ISSUED = 16_384
"""Handles that are remembered; the oldest are dropped first."""

_HANDLE = re.compile(r"\[\[samkv:([0-9a-f]{32})\]\]")
# The head or the tail of a cut handle, with enough digits to recognise it.
_PIECE = re.compile(r"\[\[samkv:([0-9a-f]{8,32})|([0-9a-f]{8,32})\]\]")


def is_handle(text: str) -> bool:
    """Whether the whole of ``text`` has the form of a handle, issued or not."""
    return _HANDLE.fullmatch(text) is not None


@dataclass(frozen=True)
class Span:
    """The place ``[start, stop)`` of a handle in a prompt string, and the text of its chunk."""

    start: int
    stop: int
    body: str


class Handles:
    """The handles that one engine has issued, and the texts of their chunks. Thread-safe.

    Handles are secret: each is a new random name, issued after a check that its reader may read the
    chunk, and only a caller who was given one can use it. Anything else that looks like a handle in
    a prompt is text. clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._issued: OrderedDict[str, tuple[str, float]] = OrderedDict()  # text, expiry
        self._has_warned = False

    def issue(self, body: str) -> str:
        """A new handle for the text ``body``, valid for `LIFETIME_S`."""
        name = secrets.token_hex(16)
        with self._lock:
            self._drop_old()
            self._issued[name] = (body, self._clock() + LIFETIME_S)
            while len(self._issued) > MAX_ISSUED:
                self._issued.popitem(last=False)
        return f"[[samkv:{name}]]"

    def find(self, prompt: str) -> list[Span]:
        """The issued handles in ``prompt``."""
        spans: list[Span] = []
        has_unknown = False
        with self._lock:
            self._drop_old()
            for match in _HANDLE.finditer(prompt):
                if issued := self._issued.get(match[1]):
                    spans.append(Span(match.start(), match.end(), issued[0]))
                else:
                    has_unknown = True
            is_first = has_unknown and not self._has_warned
            self._has_warned |= is_first
        if is_first:
            _log.warning(
                "a prompt contains a handle that this engine has not issued within the last %d "
                "minutes; it is read as text. If a prompt builder put it there, retrieve the "
                "documents again, or prompt with their text. This is said once",
                LIFETIME_S // 60,
            )
        return spans

    def require_whole(self, text: str) -> None:
        """Raises HandleError for the handle of a deleted chunk, and for a piece of a handle."""
        if not _PIECE.search(text):
            return
        with self._lock:
            names = set(self._issued)
        # 8 digits are compared first, because a prompt may hold many pieces
        heads, tails = {name[:8] for name in names}, {name[-8:] for name in names}
        for match in _PIECE.finditer(text):
            head, tail = match.groups("")
            if head[:8] not in heads and tail[-8:] not in tails:
                continue
            if head in names and text.startswith("]]", match.end()):
                raise HandleError(
                    "the prompt holds the handle of a chunk that has been deleted since it was "
                    "issued, or whose model has changed; retrieve again"
                )
            if any(name.startswith(head) and name.endswith(tail) for name in names):
                raise HandleError(
                    f"the prompt holds a handle that something cut, near "
                    f"{shorten(text[match.start() :])!r}; raise the context window of the "
                    "prompt builder, or prompt with the text of the chunk"
                )

    def forget(self, bodies: Collection[str]) -> None:
        """Remove the handles of these texts."""
        with self._lock:
            for name in [n for n, (body, _) in self._issued.items() if body in bodies]:
                del self._issued[name]

    def _drop_old(self) -> None:
        now = self._clock()
        while self._issued and next(iter(self._issued.values()))[1] <= now:
            self._issued.popitem(last=False)

"""The text of an answer's tokens, as far as it is decided."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.model.model import Model


class TextStream:
    """Tokens in, pieces of text out; ends at a stop string, which is never part of the text.

    A piece is held back while it ends in half a character, or in what may become a stop string.
    """

    def __init__(self, model: Model, stop: Sequence[str] = ()) -> None:
        self._model = model
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that ``token`` decides; empty while undecided."""
        self._ids.append(token)
        text = self._model.detokenize(self._ids)
        cuts = [at for s in self._stop if (at := text.find(s, max(0, self._sent - len(s)))) >= 0]
        if cuts:
            self.stopped = True
            return self._emit(text[: min(cuts)])
        decided = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return self._emit(text[: decided - self._undecided(text[:decided])])

    def flush(self) -> str:
        """What was held back, when no token follows."""
        return "" if self.stopped else self._emit(self._model.detokenize(self._ids))

    def _emit(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        tail = text[self._sent :]  # what was sent is decided, however long a stop string is
        ends = ((s, min(len(s) - 1, len(tail))) for s in self._stop)
        return max(
            (n for s, most in ends for n in range(1, most + 1) if tail.endswith(s[:n])), default=0
        )

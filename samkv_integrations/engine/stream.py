"""An answer, piece by piece, as text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from samkv_integrations.engine.collect import collectors
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.errors import TimedOut
from samkv_integrations.model.model import Model

_log = logging.getLogger(__name__)


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
        return max(
            (n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer, what it cost, and how it ended: by itself, or at max_new_tokens."""

    text: str
    report: Report
    finish_reason: Literal["stop", "length"]


class AnswerStream:
    """Iterator over the pieces of one answer; ``report`` is complete once it is exhausted.

    Closing it, leaving a ``with`` block of it, or dropping it frees the working cache. When it
    ends, in either way or exhausted, its report goes to the `collect_reports` blocks in which it
    was made, and a line of figures to the log, at INFO.

    timeout, began: seconds that it may take since then, a time of `time.perf_counter`; None for as
        long as it takes. Then the next piece is TimedOut, and the answer ends.
    """

    def __init__(
        self,
        first: int,
        step: Callable[[int], int],
        end_ids: frozenset[int],
        max_new_tokens: int,
        text: TextStream,
        report: Report,
        cache: WorkingCache,
        timeout: float | None = None,
        began: float = 0.0,
    ) -> None:
        self._timeout, self._began = timeout, began
        self._report = report
        self._count = 0
        self._decode_s = 0.0
        self._kv_bytes = cache.kv_bytes
        self._finish_reason: Literal["stop", "length"] | None = None
        self._collectors = collectors()
        self._is_handed_in = False
        self._pieces = self._decode(first, step, end_ids, max_new_tokens, text, cache)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)  # whatever time it took, an answer that is complete is one
        except BaseException:  # StopIteration too
            self._hand_in()
            raise
        if self._timeout is not None and time.perf_counter() - self._began > self._timeout:
            self.close()
            raise TimedOut(
                f"timeout={self._timeout}: the answer was not complete after that many seconds; "
                "give more, or ask for fewer tokens"
            )
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop decoding and free what this answer holds."""
        self._pieces.close()
        self._hand_in()

    def __del__(self) -> None:
        self.close()

    def _hand_in(self) -> None:
        if self._is_handed_in:
            return
        self._is_handed_in = True
        report = self.report
        _log.info("answered: %s", report.line, extra={"samkv": report})
        for reports in self._collectors:
            reports.append(report)

    @property
    def report(self) -> Report:
        """Figures of the answer so far."""
        rate = (self._count - 1) / self._decode_s if self._decode_s else 0.0
        return replace(
            self._report,
            completion_tokens=self._count,
            decode_tokens_per_s=rate,
            decode_kv_bytes=self._kv_bytes,
        )

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """How it ended: with an end token or stop string, or at max_new_tokens; None until then."""
        return self._finish_reason

    def _decode(
        self,
        token: int,
        step: Callable[[int], int],
        end_ids: frozenset[int],
        max_new_tokens: int,
        text: TextStream,
        cache: WorkingCache,
    ) -> Generator[str]:
        reason: Literal["stop", "length"] = "stop"
        while token not in end_ids:
            self._count += 1
            if piece := text.push(token):
                yield piece
            if text.stopped:
                break
            if self._count == max_new_tokens:
                reason = "length"
                break
            began = time.perf_counter()
            token = step(token)
            self._decode_s += time.perf_counter() - began
            self._kv_bytes = cache.kv_bytes
        if tail := text.flush():
            yield tail
        self._finish_reason = reason

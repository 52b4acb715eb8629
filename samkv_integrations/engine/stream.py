"""An answer as its reader sees it, piece by piece, in a thread or in a task."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Self

from samkv_integrations.engine.answering import AHEAD, Answering, Begun, FinishReason, Piece
from samkv_integrations.engine.collect import collectors
from samkv_integrations.engine.off_loop import off_loop
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.errors import TimedOut

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer, what it cost, and how it ended: by itself, or at max_new_tokens."""

    text: str
    report: Report
    finish_reason: FinishReason

    @classmethod
    def of(cls, text: str, stream: AnswerStream) -> Answer:
        """What a stream came to that is exhausted."""
        assert stream.finish_reason is not None
        return cls(text=text, report=stream.report, finish_reason=stream.finish_reason)


class AnswerStream:
    """Iterator over the pieces of one answer; ``report`` is complete once it is exhausted.

    For ``for`` and for ``async for``, one reader at a time. The answer is computed ahead of its
    reader, see `AHEAD`; the report is of what was read. Closing it, leaving a ``with`` block of it,
    or dropping it ends the answer and frees the working cache. When it ends, in either way or
    exhausted, its report goes to the `collect_reports` blocks in which it was made, and a line of
    figures to the log, at INFO.

    begun: called once the first token is there; may wait for a disk.
    timeout, began: seconds that it may take since then, a time of `time.perf_counter`; None for as
        long as it takes. Then the next piece is TimedOut, and the answer ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        answering: Answering,
        begun: Callable[[], None],
        timeout: float | None = None,
        began: float = 0.0,
    ) -> None:
        self._scheduler, self._answering, self._begun = scheduler, answering, begun
        self._timeout, self._began = timeout, began
        self._report: Report | None = None
        self._last = Piece(text="", n_tokens=0, decode_s=0.0, kv_bytes=0)
        self._is_submitted = self._is_over = self._is_dropped = False
        self._collectors = collectors()

    # -- reading ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Have it computed, and wait for its first token. Raises what the first pass raises."""
        try:
            self._submit()
            self._take(self._answering.outbox.next(self._left))
            self._begun()
        except BaseException as error:
            self._fail(error)
        return self

    async def astart(self) -> Self:
        """Like `start`, holding no thread."""
        try:
            self._submit()
            self._take(await self._answering.outbox.anext(self._left))
            await off_loop(self._begun)
        except BaseException as error:
            self._fail(error)
        return self

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while not self._is_over:
            try:
                text = self._take(self._answering.outbox.next(self._left))
            except BaseException as error:
                self._fail(error)
            if text:
                return text
        raise StopIteration

    async def __anext__(self) -> str:
        while not self._is_over:
            try:
                text = self._take(await self._answering.outbox.anext(self._left))
            except BaseException as error:
                self._fail(error)
            if text:
                return text
        raise StopAsyncIteration

    def _submit(self) -> None:
        self._scheduler.submit(self._answering)
        self._is_submitted = True

    @property
    def _left(self) -> float | None:
        """Seconds that the next piece may take; None if it may take what it takes."""
        if self._timeout is None or self._answering.is_complete:
            return None
        return self._began + self._timeout - time.perf_counter()

    def _take(self, item: Begun | Piece | BaseException) -> str:
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Begun):
            self._report = item.report
            self._answering.trace.begun(item.stages)
            return ""
        if len(self._answering.outbox) == AHEAD - 1:
            self._scheduler.wake()
        self._last = item
        if item.finish_reason is not None:
            self._end()
        elif (left := self._left) is not None and left < 0:
            raise TimeoutError
        return item.text

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, TimeoutError) and (left := self._left) is not None and left <= 0:
            error = TimedOut(
                f"timeout={self._timeout}: the answer was not complete after that many seconds; "
                "give more, or ask for fewer tokens"
            )
            error.__suppress_context__ = True
        self._close(error)
        raise error

    # -- ending -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop decoding and free what this answer holds; at once, the model's thread follows."""
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        if not self._is_over:
            self._end(error)
            if self._is_submitted:
                self._answering.abandon()
                self._scheduler.wake()
            else:
                self._answering.release()

    async def aclose(self) -> None:
        """`close`, as asynchronous generators have it."""
        self.close()

    def __del__(self) -> None:
        self._is_dropped = True
        self.close()

    def _end(self, error: BaseException | None = None) -> None:
        self._is_over = True
        report = None if self._report is None else self.report  # None: it never began
        if report is not None:
            _log.info("answered: %s", report.line, extra={"samkv": report})
            for reports in self._collectors:
                reports.append(report)
        self._tell(report, error)

    def _tell(self, report: Report | None, error: BaseException | None) -> None:
        end, now = self._answering.trace.end, time.perf_counter()
        end = partial(end, now, report=report, finish_reason=self.finish_reason, error=error)
        if self._is_dropped:  # perhaps by a thread that holds a lock of who is told
            self._scheduler.later(end)
        else:
            end()

    # -- figures ----------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """Figures of the answer so far."""
        assert self._report is not None  # `start` waits for it
        last = self._last
        return replace(
            self._report,
            completion_tokens=last.n_tokens,
            decode_tokens_per_s=(last.n_tokens - 1) / last.decode_s if last.decode_s else 0.0,
            decode_kv_bytes=last.kv_bytes or self._report.decode_kv_bytes,
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended: with an end token or stop string, or at max_new_tokens; None until then."""
        return self._last.finish_reason

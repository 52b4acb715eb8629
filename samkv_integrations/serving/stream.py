"""An answer as its reader gets it: an iterator over pieces of text, for threads and tasks."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NoReturn, Self, TypeVar, TypeVarTuple, Unpack

from samkv_integrations.errors import Given, TimedOut
from samkv_integrations.plan.request import Request
from samkv_integrations.report import Report
from samkv_integrations.serving.answers import FinishReason, NothingCame, Piece, RunningAnswer
from samkv_integrations.serving.listeners import Audience
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import AHEAD

_Given = TypeVarTuple("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A complete answer. finish_reason: ``stop``, or ``length`` at max_new_tokens."""

    text: str
    report: Report
    finish_reason: FinishReason

    @classmethod
    def of(cls, text: str, stream: AnswerStream) -> Answer:
        """The answer of a stream that is exhausted."""
        assert stream.finish_reason is not None
        return cls(text=text, report=stream.report, finish_reason=stream.finish_reason)


class AnswerStream(Iterator[str], AsyncIterator[str]):
    """Iterator over the pieces of one answer; ``report`` is complete once it is exhausted.

    For ``for`` and ``async for``, with one reader at a time. The answer is computed ahead of its
    reader, see `AHEAD`; the report covers what was read. Reading to the end, closing the stream or
    leaving its ``with`` block ends the answer, frees the working cache, and calls the engine's
    `Listener` functions. Dropping it frees the working cache only. After the request's timeout the
    next piece raises TimedOut.
    """

    _is_over = True  # until the object is complete

    def __init__(self, scheduler: Scheduler, request: Request, audience: Audience) -> None:
        self._scheduler, self._request, self._audience = scheduler, request, audience
        self._answer = RunningAnswer(request)
        self._last: Piece | None = None
        self._is_submitted = self._is_over = False

    # -- reading ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Queue the answer and wait for its first token. Raises what the first pass raises."""
        try:
            self._scheduler.submit(self._answer)
            self._is_submitted = True
            self._take(self._answer.pieces.next(self._left()))
            self._record()
        except BaseException as error:
            self._fail(error)
        return self

    async def astart(self) -> Self:
        """Like `start`, for a task; occupies no thread while it waits."""
        try:
            self._scheduler.submit(self._answer)
            self._is_submitted = True
            self._take(await self._answer.pieces.anext(self._left()))
            await off_loop(self._record, owner=self._answer.owner)  # as a disk may be slow
        except BaseException as error:
            self._fail(error)
        return self

    def _record(self) -> None:
        self._request.chunks.record(self._request.resolved)

    def __next__(self) -> str:
        while not self._is_over:
            try:
                text = self._take(self._answer.pieces.next(self._left()))
            except BaseException as error:
                self._fail(error)
            if text:
                return text
        raise StopIteration

    async def __anext__(self) -> str:
        while not self._is_over:
            try:
                text = self._take(await self._answer.pieces.anext(self._left()))
            except BaseException as error:
                self._fail(error)
            if text:
                return text
        raise StopAsyncIteration

    def _left(self) -> float | None:
        """Seconds until the timeout; None without one."""
        if self._request.how.settings.timeout is None or self._answer.is_complete:
            return None
        return self._request.times.began + self._request.how.settings.timeout - time.perf_counter()

    def _take(self, piece: Piece) -> str:
        if len(self._answer.pieces) == AHEAD - 1:
            self._scheduler.wake()
        self._last = piece
        if piece.finish_reason is not None:
            self._end()
        elif (left := self._left()) is not None and left < 0:
            raise NothingCame
        return piece.text

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, NothingCame):
            error = TimedOut(
                Given("timeout", self._request.how.settings.timeout),
                ": the answer was not complete after that "
                "many seconds; give more, or ask for fewer tokens",
            )
            error.__suppress_context__ = True
        if not self._is_over:
            self._abandon()
            self._end(error)
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
        """End the answer; returns at once, and the model's thread frees the working cache."""
        if not self._is_over:
            self._abandon()
            self._end()

    async def aclose(self) -> None:
        """`close`, under the name that asynchronous generators have for it."""
        self.close()

    def __del__(self) -> None:
        if not self._is_over:
            self._abandon()  # only that: any lock may be held while an object is collected

    def _abandon(self) -> None:
        if self._is_submitted:
            self._answer.is_abandoned = True
            self._scheduler.wake()
        else:
            self._answer.release()

    def _end(self, error: BaseException | None = None) -> None:
        self._is_over = True
        self._audience.tell(
            None if self._last is None else self.report, stages=self._request.stages,
            finish_reason=self.finish_reason, error=error,
        )  # fmt: skip

    # -- figures ----------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """Figures of the answer so far."""
        assert self._last is not None  # `start` has waited for it
        return self._last.report

    @property
    def finish_reason(self) -> FinishReason | None:
        """``stop`` at an end token or stop string, ``length`` at max_new_tokens; None before."""
        return None if self._last is None else self._last.finish_reason


@lru_cache(16)
def _threads(pid: int, owner: str) -> ThreadPoolExecutor:
    """A pool of threads for each owner, so that none waits for another one's work.

    Not asyncio's default pool, which other code waits for. By process, as a fork does not inherit
    threads. A pool that drops out of the cache ends its threads once their work is done.
    """
    return ThreadPoolExecutor(16, thread_name_prefix="samkv-off-loop")


async def off_loop(
    work: Callable[[Unpack[_Given]], _Made], *args: *_Given, owner: str = ""
) -> _Made:
    """Run ``work`` in a thread that sees the caller's context variables; returns its result.

    owner: who asks. Each has threads of its own.
    """
    call = partial(contextvars.copy_context().run, work, *args)
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid(), owner), call)

"""One thread that runs the model, for all who share it, and the answers that it decodes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import torch
from torch import Tensor

from samkv_integrations.engine.decode import Decoder, TextStream, decode
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.request import Request
from samkv_integrations.errors import InvalidOption, Overloaded
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampler

_Made = TypeVar("_Made")

AHEAD = 32
"""Pieces that an answer may be ahead of its reader. Then it stands aside for others."""

FinishReason = Literal["stop", "length"]


class Abandoned(Exception):
    """Nobody reads the answer any more; ends its first pass."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that is decided, empty at the beginning and end, and what the answer is up to then.

    n_tokens: tokens so far. decode_s: seconds of the steps of all but the first. kv_bytes: working
    cache. finish_reason: how the answer ended; None while it goes on.
    """

    text: str
    n_tokens: int
    decode_s: float
    kv_bytes: int
    finish_reason: FinishReason | None = None


class Pieces:
    """A queue from the model's thread to the one reader of an answer, a thread or a task.

    Putting never waits; reading does, at most ``timeout`` seconds. An error in it is raised.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Piece | BaseException] = deque()
        self._reader: Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Piece | BaseException) -> None:
        """Add a piece or an error, and wake the reader."""
        with self._lock:
            self._items.append(item)
            reader, self._reader = self._reader, None
        if reader is not None and reader.set_running_or_notify_cancel():
            reader.set_result(None)

    def next(self, timeout: float | None = None) -> Piece:
        """The next piece. Raises TimeoutError if there is none within ``timeout`` seconds."""
        while (reader := self._wait()) is not None:
            try:
                reader.result(timeout)
            except BaseException:
                reader.cancel()
                raise
        return self._pop()

    async def anext(self, timeout: float | None = None) -> Piece:
        """Like `next`, for a task, which holds no thread."""
        while (reader := self._wait()) is not None:
            # a cancelled task cancels the reader with it
            await asyncio.wait_for(asyncio.wrap_future(reader), timeout)
        return self._pop()

    def _wait(self) -> Future[None] | None:
        """What is done when there may be an item; None if there is one now."""
        with self._lock:
            self._reader = None if self._items else Future()
            return self._reader

    def _pop(self) -> Piece:
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item


class RunningAnswer:
    """One answer, from a request that waits to its last token.

    The model's thread calls `begin` and `take`, and `fail` if they raise; anybody may `abandon`.

    pieces: for whoever reads it; the first one is empty, when the first token is there. report,
    stages: of the first token, there with that piece. is_complete: whether all of it is in there.
    """

    report: Report
    stages: Sequence[Stage]

    def __init__(self, request: Request) -> None:
        self.request, self.kv_bytes = request, request.kv_bytes
        self.pieces = Pieces()
        self.is_complete = self.is_abandoned = False
        self._text = TextStream(request.model, request.stop)
        self._sampler: Sampler | None = None
        self._decoder: Decoder | None = None
        self._token = self._n_tokens = 0
        self._decode_s = 0.0

    def abandon(self) -> None:
        """Compute no more of it. Takes no lock: a finaliser may call it anywhere."""
        self.is_abandoned = True

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to compute."""
        return self.is_complete or self.is_abandoned

    @property
    def is_ahead(self) -> bool:
        """Whether its reader is to catch up first."""
        return len(self.pieces) >= AHEAD

    def begin(self) -> None:
        """Compute the first token. Raises Abandoned if nobody waits for it any more."""
        request, model = self.request, self.request.model
        wait_s = time.perf_counter() - request.asked
        with request.resolved, model.interruptible(self._check):
            first = first_token(request)
            ids = first.layout.token_ids.tolist()
            self._sampler = Sampler(model, ids, request.sampling, request.form)
            token = self._sampler.next(first.logits)
        ttft_s = time.perf_counter() - request.began
        self.report = replace(
            first.report, wait_s=wait_s, announce_s=request.announce_s, ttft_s=ttft_s
        )
        self.stages = (
            Stage(name="read", began=request.began, ended=request.asked),
            Stage(name="wait", began=request.asked, ended=request.asked + wait_s),
            *first.stages,
        )
        self._decoder = Decoder(model, first.cache, first.layout.n_tokens)
        self._put("")
        self._go_on(token)

    def _check(self) -> None:
        if self.is_abandoned:
            raise Abandoned

    def release(self) -> None:
        """Free what it holds; nothing of it is computed any more."""
        if self._decoder is None:
            self.request.resolved.close()
        self._decoder = self._sampler = None

    @property
    def next_step(self) -> tuple[Decoder, int]:
        """What goes through the model next."""
        assert self._decoder is not None
        return self._decoder, self._token

    def take(self, logits: Tensor, seconds: float) -> None:
        """Take what a step of ``seconds`` made of `next_step`: (vocabulary,)."""
        assert self._sampler is not None
        self._decode_s += seconds
        self._go_on(self._sampler.next(logits))

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the answer is read, after all that is there."""
        self.is_complete = True
        if self._decoder is not None:
            self._put("")  # how far it came
        self.pieces.put(error)

    def _go_on(self, token: int) -> None:
        self._token = token
        if token in self.request.end_ids:
            self._end("stop")
            return
        self._n_tokens += 1
        if text := self._text.push(token):
            self._put(text)
        if self._text.stopped:
            self._end("stop")
        elif self._n_tokens == self.request.capacity:
            self._end("length")

    def _end(self, reason: FinishReason) -> None:
        if tail := self._text.flush():
            self._put(tail)
        self.is_complete = True
        self._put("", reason)

    def _put(self, text: str, finish_reason: FinishReason | None = None) -> None:
        assert self._decoder is not None
        piece = Piece(
            text=text, n_tokens=self._n_tokens, decode_s=self._decode_s,
            kv_bytes=self._decoder.cache.kv_bytes, finish_reason=finish_reason,
        )  # fmt: skip
        self.pieces.put(piece)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler takes on.

    max_batch: answers of one step. With 1, they are computed one after another.
    max_kv_bytes: KV that the answers under way may come to, each counted at its full prompt and
        all its tokens; None for no limit. An answer that is larger by itself is computed alone.
    max_waiting: answers that may wait for their first pass; None for no limit.
    """

    max_batch: int = 8
    max_kv_bytes: int | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_kv_bytes", 1), ("max_waiting", 0)):
            value, may_be_none = getattr(self, name), name != "max_batch"
            if type(value) is int and value >= least or (value is None and may_be_none):
                continue
            raise InvalidOption(
                f"{name}={value!r}; it must be a whole number of at least {least}"
                f"{', or None' if may_be_none else ''}"
            )


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a scheduler does at a moment.

    running: answers that have begun. waiting: those that have not. kv_bytes: KV that the running
    ones may come to.
    """

    running: int
    waiting: int
    kv_bytes: int


class Scheduler:
    """Runs a model on one thread, for all who share it.

    Between two steps of the answers under way it does one thing at most that takes longer: the
    first pass of the next answer, or a pass of `run`. Answers begin in the order in which they
    came. One whose reader is `AHEAD` pieces behind stands aside and leaves its place to others.

    The thread starts when there is something to do, and ends with the scheduler. Safe to use from
    many threads, and after a fork.
    """

    def __init__(self, model: Model, limits: Limits | None = None) -> None:
        self.model = model
        self.limits = limits or Limits()
        self._starting = threading.Lock()
        self._thread: _Thread | None = None

    @classmethod
    def of(cls, model: Model, given: Scheduler | None) -> Scheduler:
        """The scheduler that was given, or a new one. Raises InvalidOption if it does not fit."""
        if given is None:
            return cls(model)
        if not isinstance(given, Scheduler):
            raise InvalidOption(f"scheduler={given!r}; it must be Scheduler(model), or None")
        if given.model is not model:
            raise InvalidOption(
                f"scheduler runs another model, {given.model.name!r}; give Scheduler(model) of the "
                "engine's own"
            )
        return given

    @property
    def load(self) -> Load:
        """What it does at the moment."""
        thread = self._thread
        return Load(running=0, waiting=0, kv_bytes=0) if thread is None else thread.load

    def submit(self, answer: RunningAnswer) -> None:
        """Have an answer computed. Raises Overloaded if too many wait already."""
        self._running_thread().submit(answer)

    def wake(self) -> None:
        """Look again at the answers: one was abandoned, or read. Takes no lock."""
        if self._thread is not None:
            self._thread.mail.put(None)

    def run(self, work: Callable[[], _Made]) -> _Made:
        """What ``work`` returns or raises, from the model's thread, without gradients."""
        thread = self._running_thread()
        if thread.is_current:
            return work()
        done: Future[_Made] = Future()
        thread.mail.put(partial(_settle, done, work))
        try:
            return done.result()
        finally:
            done.cancel()  # of a caller who was interrupted while it waited

    def _running_thread(self) -> _Thread:
        with self._starting:
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _Thread(self.limits)
                weakref.finalize(self, self._thread.stop)
            self._thread.n_torch_threads = torch.get_num_threads()
            return self._thread


def _settle(done: Future[_Made], work: Callable[[], _Made]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class _Thread:
    """The thread of a scheduler, of which it holds nothing, so that it ends with it.

    mail: answers, work, and None for a change of either; from any thread.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.pid = os.getpid()
        self.n_torch_threads = torch.get_num_threads()
        self.mail: SimpleQueue[RunningAnswer | Callable[[], None] | None] = SimpleQueue()
        self._counting = threading.Lock()
        self._n_waiting = 0
        self._is_stopped = False
        self._queue: deque[RunningAnswer | Callable[[], None]] = deque()
        self._running: list[RunningAnswer] = []
        self._thread = threading.Thread(target=self._serve, name="samkv-model", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def load(self) -> Load:
        running = list(self._running)
        kv_bytes = sum(answer.kv_bytes for answer in running)
        return Load(running=len(running), waiting=self._n_waiting, kv_bytes=kv_bytes)

    def submit(self, answer: RunningAnswer) -> None:
        most = self._limits.max_waiting
        with self._counting:
            # a free place does not keep its answer waiting
            n_free = max(0, self._limits.max_batch - len(self._running))
            if most is not None and self._n_waiting >= most + n_free:
                raise Overloaded(
                    f"{self._n_waiting} answers wait already, and max_waiting is {most}; ask "
                    "again later, or allow more"
                )
            self._n_waiting += 1
        self.mail.put(answer)

    def stop(self) -> None:
        """End the thread after the step that it is at."""
        self._is_stopped = True
        self.mail.put(None)
        if not self.is_current and self.pid == os.getpid():
            self._thread.join()

    def _serve(self) -> None:
        with torch.inference_mode():
            while not self._is_stopped:
                self._read_mail()
                self._drop()
                if torch.get_num_threads() != self.n_torch_threads:  # each thread has its own
                    torch.set_num_threads(self.n_torch_threads)
                if (at := self._next) is not None:
                    self._do(at)
                self._step()
                self._drop()

    def _read_mail(self) -> None:
        """Take what has come; wait for it if there is nothing to do."""
        is_idle = self._next is None and not self._batch
        while True:
            try:
                letter = self.mail.get(block=is_idle)
            except Empty:
                return
            is_idle = False
            if letter is not None:
                self._queue.append(letter)

    @property
    def _next(self) -> int | None:
        """Where in the queue that stands which comes next: an answer in its turn, or a work."""
        is_their_turn = self._has_place
        for at, letter in enumerate(self._queue):
            if not isinstance(letter, RunningAnswer):
                return at
            if is_their_turn and self._fits(letter):
                return at
            is_their_turn = False  # a smaller one does not overtake
        return None

    @property
    def _has_place(self) -> bool:
        return len(self._batch) < self._limits.max_batch

    def _fits(self, answer: RunningAnswer) -> bool:
        most = self._limits.max_kv_bytes
        if most is None or not self._running:
            return True
        return sum(each.kv_bytes for each in (*self._running, answer)) <= most

    @property
    def _batch(self) -> list[RunningAnswer]:
        """The answers of the next step."""
        ready = [each for each in self._running if not (each.is_over or each.is_ahead)]
        return ready[: self._limits.max_batch]

    def _drop(self) -> None:
        """Let go of answers of which nothing more is computed."""
        answers = (each for each in self._queue if isinstance(each, RunningAnswer))
        for answer in [each for each in answers if each.is_abandoned]:
            self._queue.remove(answer)
            self._end(answer)
        for answer in [each for each in self._running if each.is_over]:
            self._running.remove(answer)
            answer.release()

    def _do(self, at: int) -> None:
        """What takes longer than a step: a pass of `run`, or the first one of an answer."""
        letter = self._queue[at]
        del self._queue[at]
        if not isinstance(letter, RunningAnswer):
            letter()
            return
        try:
            letter.begin()
        except Abandoned:
            self._end(letter)
        except BaseException as error:
            self._end(letter)
            letter.fail(error)
        else:
            with self._counting:
                self._n_waiting -= 1
                self._running.append(letter)

    def _end(self, answer: RunningAnswer) -> None:
        """Let go of one that has not begun."""
        with self._counting:
            self._n_waiting -= 1
        answer.release()

    def _step(self) -> None:
        """One token more for each answer of a batch."""
        if not (batch := self._batch):
            return
        began = time.perf_counter()
        try:
            logits = decode(*zip(*(each.next_step for each in batch), strict=True))
        except BaseException as error:
            for answer in batch:
                answer.fail(error)
            return
        seconds = time.perf_counter() - began
        for answer, of_one in zip(batch, logits, strict=True):
            try:
                answer.take(of_one, seconds)
            except BaseException as error:
                answer.fail(error)
        if len(self._running) > len(batch):  # who has been passed over comes first the next time
            self._running = [each for each in self._running if each not in batch] + batch

"""Who may use the model, and when: one thread that decodes all answers under way together."""

from __future__ import annotations

import _thread
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from samkv_integrations.engine.answering import Abandoned, Answering
from samkv_integrations.engine.decode import decode
from samkv_integrations.errors import InvalidOption, Overloaded
from samkv_integrations.model.model import Model

_Made = TypeVar("_Made")


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
        for name, value, least in (
            ("max_batch", self.max_batch, 1),
            ("max_kv_bytes", self.max_kv_bytes, 1),
            ("max_waiting", self.max_waiting, 0),
        ):
            is_none = value is None and name != "max_batch"
            if not is_none and (type(value) is not int or value < least):
                allowed = f"a whole number of at least {least}"
                more = "" if name == "max_batch" else ", or None"
                raise InvalidOption(f"{name}={value!r}; it must be {allowed}{more}")


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

    def submit(self, answering: Answering) -> None:
        """Have an answer computed. Raises Overloaded if too many wait already."""
        self._running_thread().submit(answering)

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

    def later(self, work: Callable[[], object]) -> None:
        """Have ``work`` done by another thread, the model's if it runs. Takes no lock, like `wake`.

        After a fork it is the parent's to do: nothing is done here.
        """
        thread = self._thread
        if thread is None or thread.is_stopped:
            # a `threading.Thread` takes a lock to start, which who is interrupted here may hold
            with suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(_settle, (Future[object](), work))
        elif thread.pid == os.getpid():
            thread.mail.put(partial(_settle, Future[object](), work))

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

    mail: answers, work, and None for a change of either; from any thread. is_stopped: whether what
        comes now may not be read any more.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.pid = os.getpid()
        self.n_torch_threads = torch.get_num_threads()
        self.mail: SimpleQueue[Answering | Callable[[], None] | None] = SimpleQueue()
        self._counting = threading.Lock()
        self._n_waiting = 0
        self.is_stopped = False
        self._queue: deque[Answering | Callable[[], None]] = deque()
        self._running: list[Answering] = []
        self._thread = threading.Thread(target=self._serve, name="samkv-model", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def load(self) -> Load:
        running = list(self._running)
        return Load(
            running=len(running),
            waiting=self._n_waiting,
            kv_bytes=sum(answering.kv_bytes for answering in running),
        )

    def submit(self, answering: Answering) -> None:
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
        self.mail.put(answering)

    def stop(self) -> None:
        """End the thread after the step that it is at."""
        self.is_stopped = True
        self.mail.put(None)
        if not self.is_current and self.pid == os.getpid():
            self._thread.join()

    def _serve(self) -> None:
        with torch.inference_mode():
            while not self.is_stopped:
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
            if not isinstance(letter, Answering):
                return at
            if is_their_turn and self._fits(letter):
                return at
            is_their_turn = False  # a smaller one does not overtake
        return None

    @property
    def _has_place(self) -> bool:
        return len(self._batch) < self._limits.max_batch

    def _fits(self, answering: Answering) -> bool:
        most = self._limits.max_kv_bytes
        if most is None or not self._running:
            return True
        return sum(each.kv_bytes for each in (*self._running, answering)) <= most

    @property
    def _batch(self) -> list[Answering]:
        """The answers of the next step."""
        ready = [each for each in self._running if not (each.is_over or each.is_ahead)]
        return ready[: self._limits.max_batch]

    def _drop(self) -> None:
        """Let go of answers of which nothing more is computed."""
        answers = (each for each in self._queue if isinstance(each, Answering))
        for answering in [each for each in answers if each.is_abandoned]:
            self._queue.remove(answering)
            self._end(answering)
        for answering in [each for each in self._running if each.is_over]:
            self._running.remove(answering)
            answering.release()

    def _do(self, at: int) -> None:
        """What takes longer than a step: a pass of `run`, or the first one of an answer."""
        letter = self._queue[at]
        del self._queue[at]
        if not isinstance(letter, Answering):
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

    def _end(self, answering: Answering) -> None:
        """Let go of one that has not begun."""
        with self._counting:
            self._n_waiting -= 1
        answering.release()

    def _step(self) -> None:
        """One token more for each answer of a batch."""
        if not (batch := self._batch):
            return
        began = time.perf_counter()
        try:
            logits = decode(*zip(*(each.next_step for each in batch), strict=True))
        except BaseException as error:
            for answering in batch:
                answering.fail(error)
            return
        seconds = time.perf_counter() - began
        for answering, of_one in zip(batch, logits, strict=True):
            try:
                answering.take(of_one, seconds)
            except BaseException as error:
                answering.fail(error)
        if len(self._running) > len(batch):  # who has been passed over comes first the next time
            self._running = [each for each in self._running if each not in batch] + batch

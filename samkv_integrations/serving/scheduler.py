"""The scheduler: one thread that runs the model, and decodes several answers in each step."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from samkv_integrations.errors import Given, InvalidOption, OutOfMemory, Overloaded
from samkv_integrations.runtimes.base import MOST_ROWS, Runtime
from samkv_integrations.serving.answers import Abandoned, RunningAnswer
from samkv_integrations.serving.turns import Call, Job, Limits, Turns

_Made = TypeVar("_Made")

_log = logging.getLogger(__name__)

PASS_SHARE = 4
"""A pass gets so many times the model time of the steps that interrupt it."""

LEAST_PART_S = 0.005
"""Least seconds of a pass between two interruptions."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of a scheduler.

    running: answers that have begun. waiting: those that have not. kv_bytes: KV entries that the
    running ones may need.
    """

    running: int
    waiting: int
    kv_bytes: int


class Scheduler:
    """Runs a model on one thread, which several engines may share.

    Between two decoding steps it runs at most one job: the first token of the next answer, or a
    call of `run`. On a CPU, steps also run between the layers of the job's passes. An answer that
    is `AHEAD` pieces ahead of its reader is paused, and another one takes its place in the batch.

    The thread starts with the first job, and ends with the scheduler. Thread-safe, and usable after
    a fork that happened while no other thread used it.

    turns: decides on the next job; `FairTurns` where several owners share the model.
    """

    def __init__(
        self, model: Runtime, limits: Limits | None = None, *,
        turns: Callable[[Limits], Turns] = Turns,
    ) -> None:  # fmt: skip
        self.model = model
        self.limits = (limits or Limits()).within(model.kv_room, model.most_running)
        self._turns = turns
        self._starting = threading.Lock()
        self._thread: _ModelThread | None = None

    @classmethod
    def of(cls, model: Runtime, given: Scheduler | None) -> Scheduler:
        """``given``, or a new one. Raises InvalidOption if ``given`` runs another model."""
        if given is None:
            return cls(model)
        if not isinstance(given, Scheduler):
            raise InvalidOption(Given("scheduler", given), "; it must be Scheduler(model), or None")
        if given.model is not model:
            raise InvalidOption(
                f"scheduler runs another model, {given.model.name!r}; give Scheduler(model) of the "
                "engine's own"
            )
        return given

    @property
    def load(self) -> Load:
        """Its current load."""
        if self._thread is None:
            return Load(running=0, waiting=0, kv_bytes=0)
        running = list(self._thread.running)
        kv_bytes = sum(answer.kv_bytes for answer in running)
        waiting = self._thread.n_waiting.total()
        return Load(running=len(running), waiting=waiting, kv_bytes=kv_bytes)

    @property
    def pass_s(self) -> float:
        """Seconds that the current pass or step has taken so far; 0 without one."""
        began = None if self._thread is None else self._thread.pass_began
        return 0.0 if began is None else time.perf_counter() - began

    def submit(self, answer: RunningAnswer) -> None:
        """Queue an answer. Raises Overloaded if too many wait already."""
        thread, most = self._running_thread(), self.limits.max_waiting
        with thread.counting:
            # an answer with a free place does not wait
            n_free = max(0, self.limits.max_batch - len(thread.running))
            n_waiting = thread.n_waiting[answer.owner]
            if most is not None and n_waiting >= most + n_free:
                raise Overloaded(
                    f"{n_waiting} answers wait already, and max_waiting is {most}; ask again "
                    "later, or allow more"
                )
            thread.arriving.put(answer)  # before it is counted: a counted answer can be begun
            thread.n_waiting[answer.owner] += 1

    def wake(self) -> None:
        """Tell the thread that an answer was abandoned or read. Takes no lock."""
        if self._thread is not None:
            self._thread.arriving.put(None)

    def run(self, work: Callable[[Callable[[], None]], _Made], *, owner: str = "") -> _Made:
        """Run ``work`` in the model's thread; returns or raises what it does.

        work: gets a function that it calls between two parts of its passes; other answers go on
            meanwhile. owner: whose model time it takes.
        """
        thread = self._running_thread()
        if threading.current_thread() is thread.thread:
            return work(lambda: None)
        done: Future[_Made] = Future()

        def call() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(thread.pause))
            except BaseException as error:
                done.set_exception(error)

        def fail(error: BaseException) -> None:
            if not done.done():
                done.set_exception(error)

        thread.arriving.put(Call(owner=owner, call=call, fail=fail))
        try:
            return done.result()
        finally:
            done.cancel()  # if the caller was interrupted while it waited

    def _running_thread(self) -> _ModelThread:
        with self._starting:
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _ModelThread(self.model, self._turns(self.limits))
                weakref.finalize(self, self._thread.stop)
            self._thread.n_threads = self.model.n_threads()
            return self._thread


@dataclass(kw_only=True)
class _CurrentJob:
    """The job in progress. charged_s: model time charged to its owner, up to ``charged_at``."""

    job: Job
    charged_at: float
    charged_s: float = 0.0


class _ModelThread:
    """The thread of a scheduler. It does not refer to the scheduler, and ends with it.

    arriving: new jobs from any thread; None to wake this one. counting: the lock for
    n_waiting (owner -> answers that have not begun) and running (those that have).
    pass_began: when the current pass or step began; None without one.
    """

    def __init__(self, model: Runtime, turns: Turns) -> None:
        self._model, self._turns = model, turns
        self.pid = os.getpid()
        self.n_threads = model.n_threads()
        self.arriving: SimpleQueue[Job | None] = SimpleQueue()
        self.counting = threading.Lock()
        self.n_waiting = Counter[str]()
        self.running: list[RunningAnswer] = []
        self.pass_began: float | None = None
        self._waiting: list[Job] = []
        self._current: _CurrentJob | None = None  # the job that may be interrupted
        self._paused: _CurrentJob | None = None  # the job that is interrupted now
        self._step_ended, self._step_s = 0.0, 0.0  # of the last step
        self._is_stopped = False
        self.thread = threading.Thread(target=self._serve, name="samkv-model", daemon=True)
        self.thread.start()
        # an interpreter that ends while a thread frees a model aborts
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread after its current step."""
        if self.pid != os.getpid():  # a fork, which inherits no thread
            return
        self._is_stopped = True
        self.arriving.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _serve(self) -> None:
        is_busy = True
        with self._model.thread():
            while not self._is_stopped:
                try:
                    is_busy = self._turn(wait=not is_busy)
                except BaseException as error:  # else all who wait would wait for ever
                    _log.exception("the model's thread failed; what it was asked for fails")
                    self._fail_all(error)
                    is_busy = True
        atexit.unregister(self.stop)

    def _turn(self, *, wait: bool) -> bool:
        """At most one job, then a step; whether there was anything to do."""
        self._receive(wait=wait)
        self._remove_ended()
        self._model.use_threads(self.n_threads)
        job = self._turns.next(self._waiting, self.running, None)
        if job is not None:
            self._run_job(job)
        return self._step() or job is not None

    def _fail_all(self, error: BaseException) -> None:
        """Tell ``error`` to all who wait."""
        self.pass_began = self._current = self._paused = None
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if isinstance(job, RunningAnswer):
                self._end_waiting(job)
            job.fail(error)
        for answer in self.running:
            if not answer.is_complete:
                answer.fail(error)  # and `_remove_ended` releases it

    def _receive(self, *, wait: bool) -> None:
        """Queue the jobs that have arrived. wait: whether to wait for the first."""
        while True:
            try:
                job = self.arriving.get(block=wait)
            except Empty:
                return
            wait = False
            if job is not None:
                self._waiting.append(job)

    def _remove_ended(self) -> None:
        """Remove answers that are complete or abandoned."""
        for job in list(self._waiting):
            if isinstance(job, RunningAnswer) and job.is_abandoned:
                self._waiting.remove(job)
                self._end_waiting(job)
        for answer in list(self.running):
            if answer.is_complete or answer.is_abandoned:
                self.running.remove(answer)
                answer.release()

    def _end_waiting(self, answer: RunningAnswer) -> None:
        """Remove an answer that has not begun."""
        with self.counting:
            self.n_waiting -= Counter([answer.owner])  # which drops owners at 0
        answer.release()

    def _run_job(self, job: Job) -> None:
        """Run a job of the queue: a call, or the first token of an answer."""
        self._waiting.remove(job)
        self.pass_began = time.perf_counter()
        self._current = current = _CurrentJob(job=job, charged_at=self.pass_began)
        if isinstance(job, Call):
            job.call()
        else:
            try:
                job.begin(self.pause)
            except Abandoned:  # without `fail`: the error would keep the tensors of the pass
                self._end_waiting(job)
            except BaseException as error:
                self._end_waiting(job)
                job.fail(error)
            else:
                with self.counting:
                    self.n_waiting -= Counter([job.owner])
                    self.running.append(job)
        self.pass_began = self._current = None
        self._charge(current)
        if isinstance(job, Call):
            self._turns.has_called(job.owner, current.charged_s)

    def _charge(self, current: _CurrentJob) -> None:
        """Charge the owner of a job the time since ``current.charged_at``."""
        now = time.perf_counter()
        self._turns.charge(current.job.owner, now - current.charged_at)
        current.charged_s += now - current.charged_at
        current.charged_at = now

    def pause(self) -> None:
        """Let other answers go on for a moment, between two parts of the current job.

        A waiting job runs first if it may interrupt this one. Then a step runs if an owner in it is
        owed one, or if the last step ended more than `PASS_SHARE` times its own seconds ago.
        """
        current, now = self._current, time.perf_counter()
        if current is None or now - current.charged_at < LEAST_PART_S or self._is_stopped:
            return
        self._charge(current)
        outer, self._current, self._paused = self._paused, None, current
        try:
            self._receive(wait=False)
            self._remove_ended()
            if outer is None:
                job = self._turns.next(self._waiting, self.running, current.job)
                if job is not None and self._turns.may_interrupt(job, current.job):
                    self._run_job(job)
            is_due = now - self._step_ended > PASS_SHARE * self._step_s
            if is_due or self._turns.is_owed_a_step(self._turns.batch(self.running), current.job):
                self._step()
        finally:
            self._current, self._paused = current, outer
            current.charged_at = time.perf_counter()
            self.pass_began = current.charged_at - current.charged_s

    def _step(self) -> bool:
        """Decode the next token of each answer in the batch, with the tokens drafted after it.

        If the device has no memory for it, each answer is tried once more, alone and without hot
        chunks. Returns False if the batch is empty.
        """
        if not (batch := self._turns.batch(self.running)):
            return False
        if len(self.running) > len(batch):  # the others come first the next time
            self.running = [each for each in self.running if each not in batch] + batch
        began = time.perf_counter()
        error = self._decode(batch)
        self._step_ended = time.perf_counter()
        self._step_s = self._step_ended - began
        if error is None:
            return True
        for answer in batch:
            answer.request.free_memory()
        for answer in batch:
            assert answer.sequence is not None
            # entries that a rule evicts during a step cannot be restored
            own = self._decode([answer]) if answer.sequence.can_rewind else error
            if own is not None:
                answer.fail(own)
                self.running.remove(answer)
                answer.release()  # its memory, for the others
        return True

    def _decode(self, batch: list[RunningAnswer]) -> OutOfMemory | None:
        """A step of these answers. Without memory for it returns the error, and changes none."""
        self.pass_began = time.perf_counter()
        sequences, tokens = [], []
        try:
            most = MOST_ROWS // len(batch) - 1
            for answer in batch:
                assert answer.sequence is not None
                drafted = answer.draft(most) if most > 0 else []
                sequences.append(answer.sequence)
                tokens.append([answer.token, *drafted])
            began = time.perf_counter()
            logits = self._model.decode(sequences, tokens)
        except OutOfMemory as error:
            return error.with_traceback(None)  # the traceback would keep the sequences
        except BaseException as error:
            for answer in batch:
                answer.fail(error)
            return None
        finally:
            self.pass_began = None
        seconds = time.perf_counter() - began
        for answer, (_, *drafted), of_one in zip(batch, tokens, logits, strict=True):
            began = time.perf_counter()
            try:
                answer.advance(drafted, of_one, seconds)
            except BaseException as error:
                answer.fail(error)
            # choosing a token takes long where a JSON schema rules out others
            own_s = time.perf_counter() - began
            self._turns.charge(answer.owner, seconds / len(batch) + own_s)
        return None

"""One thread that runs the model, for all who share it, and the answers that it decodes."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import torch

from samkv_integrations.engine.decode import Decoder, TextStream, decode
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.request import Request
from samkv_integrations.errors import InvalidOption, Overloaded
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampler

_Made = TypeVar("_Made")

_log = logging.getLogger(__name__)

OWNER: ContextVar[str] = ContextVar("samkv_owner", default="")
"""Whose work it is that follows, such as of a key of a server. Owners take turns at the model."""

AHEAD = 32
"""Pieces that an answer may be ahead of its reader. Then it stands aside for others."""

FinishReason = Literal["stop", "length"]


class TooLate(Exception):
    """There is no piece in time."""


class Abandoned(Exception):
    """Nobody reads the answer any more; ends the passes to its first token."""


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
        # the last one is still to come
        self._items: deque[Future[Piece | BaseException]] = deque([Future()])

    def __len__(self) -> int:
        return len(self._items) - 1

    def put(self, item: Piece | BaseException) -> None:
        """Add a piece or an error, and wake the reader."""
        coming = self._items[-1]
        self._items.append(Future())
        coming.set_result(item)

    def next(self, timeout: float | None = None) -> Piece:
        """The next piece. Raises TooLate if there is none within ``timeout`` seconds."""
        try:
            item = self._items[0].result(timeout)
        except TimeoutError as error:
            raise TooLate from error
        self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    async def anext(self, timeout: float | None = None) -> Piece:
        """Like `next`, for a task, which holds no thread."""
        coming = self._items[0]
        if not coming.done():
            # a task that is cancelled cancels what it waits for, and the piece comes all the same
            waiting = asyncio.shield(asyncio.wrap_future(coming))
            try:
                await asyncio.wait_for(waiting, timeout)
            except TimeoutError as error:
                raise TooLate from error
        return self.next()


class RunningAnswer:
    """One answer, from a request that waits to its last token.

    The model's thread calls `begin` and `take`, and `fail` if they raise.

    owner: who asks, see `OWNER`. pieces: for whoever reads it; the first one is empty, when the
    first token is there. report, stages: of the first token, there with that piece. is_complete:
    whether all of it is in there. is_abandoned: whether nobody reads it any more, set by the
    reader. decoder, sampler: of its later tokens, None before the first one and at the end. token:
    goes through the model next.
    """

    report: Report
    stages: Sequence[Stage]

    def __init__(self, request: Request) -> None:
        self.request, self.owner = request, OWNER.get()
        n_entries = len(request.resolved.token_ids) + request.capacity
        self.kv_bytes = n_entries * request.model.token_kv_bytes  # the most that it can hold
        self.pieces = Pieces()
        self.is_complete = self.is_abandoned = False
        self.decoder: Decoder | None = None
        self.sampler: Sampler | None = None
        self.token = self._n_tokens = 0
        self._decode_s = 0.0
        self._text = TextStream(request.model, request.settings.stop)

    def begin(self) -> None:
        """Compute the first token. Raises Abandoned if nobody waits for it any more."""
        request, model = self.request, self.request.model
        began = time.perf_counter()

        def check() -> None:
            if self.is_abandoned:
                raise Abandoned

        with closing(request.resolved), model.interruptible(check):
            first = first_token(request)
            ids = first.layout.token_ids.tolist()
            self.sampler = Sampler(model, ids, request.settings.sampling, request.form)
            token = self.sampler.next(first.logits)
        self.report = replace(
            first.report, wait_s=began - request.asked, announce_s=request.announce_s,
            ttft_s=time.perf_counter() - request.began,
        )  # fmt: skip
        self.stages = (
            Stage(name="read", began=request.began, ended=request.asked),
            Stage(name="wait", began=request.asked, ended=began),
            *first.stages,
        )
        self.decoder = Decoder(model, first.cache, first.layout.n_tokens)
        self._put("")
        self.take(token, 0.0)

    def take(self, token: int, seconds: float) -> None:
        """Take the next token, from a step of ``seconds``."""
        self.token = token
        self._decode_s += seconds
        text = ""
        reason: FinishReason | None = None
        if token in self.request.end_ids:
            reason = "stop"
        else:
            self._n_tokens += 1
            text = self._text.push(token)
            if self._text.stopped:
                reason = "stop"
            elif self._n_tokens == self.request.capacity:
                reason = "length"
        if reason is not None:
            text += self._text.flush()
        if text:
            self._put(text)
        if reason is not None:
            self.is_complete = True
            self._put("", reason)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the answer is read, after all that is there."""
        self.is_complete = True
        if self.decoder is not None:
            self._put("")  # how far it came
        self.pieces.put(error)

    def release(self) -> None:
        """Free what it holds; nothing of it is computed any more."""
        if self.decoder is None:
            self.request.resolved.close()
        self.decoder = self.sampler = None

    def _put(self, text: str, finish_reason: FinishReason | None = None) -> None:
        assert self.decoder is not None
        piece = Piece(
            text=text, n_tokens=self._n_tokens, decode_s=self._decode_s,
            kv_bytes=self.decoder.cache.kv_bytes, finish_reason=finish_reason,
        )  # fmt: skip
        self.pieces.put(piece)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler takes on.

    max_batch: answers of one step. With 1, they are computed one after another.
    max_kv_bytes: KV that the answers under way may come to, each counted at its full prompt and
        all its tokens; None for no limit. An answer that is larger by itself is computed alone.
    max_waiting: answers of an owner that may wait for their first token; None for no limit.
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
    first token of the next answer, or a pass of `run`, after which answers of the same owner have
    as much time. While there are several owners, see `OWNER`, each has its share of the time. An
    owner begins no answer beyond half of the places of a batch then, and where one has more, its
    answers take turns at the places that it keeps. Answers of one owner begin in the order in
    which they came. One whose reader is `AHEAD` pieces behind stands aside and leaves its place to
    others.

    The thread starts when there is something to do, and ends with the scheduler. Safe to use from
    many threads, and after a fork that was made while no other thread asked.
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
        if self._thread is None:
            return Load(running=0, waiting=0, kv_bytes=0)
        running = list(self._thread.running)
        kv_bytes = sum(answer.kv_bytes for answer in running)
        waiting = self._thread.n_waiting.total()
        return Load(running=len(running), waiting=waiting, kv_bytes=kv_bytes)

    @property
    def pass_s(self) -> float:
        """Seconds that the pass or step under way has taken so far; 0 while there is none."""
        began = None if self._thread is None else self._thread.pass_began
        return 0.0 if began is None else time.perf_counter() - began

    def submit(self, answer: RunningAnswer) -> None:
        """Have an answer computed. Raises Overloaded if too many wait already."""
        thread, most = self._running_thread(), self.limits.max_waiting
        with thread.counting:
            # a free place does not keep its answer waiting
            n_free = max(0, self.limits.max_batch - len(thread.running))
            n_waiting = thread.n_waiting[answer.owner]
            if most is not None and n_waiting >= most + n_free:
                raise Overloaded(
                    f"{n_waiting} answers wait already, and max_waiting is {most}; ask again "
                    "later, or allow more"
                )
            thread.mail.put(answer)  # first: one that is counted as waiting can be begun
            thread.n_waiting[answer.owner] += 1

    def wake(self) -> None:
        """Look again at the answers: one was abandoned, or read. Takes no lock."""
        if self._thread is not None:
            self._thread.mail.put(None)

    def run(self, work: Callable[[], _Made]) -> _Made:
        """What ``work`` returns or raises, from the model's thread, without gradients."""
        thread = self._running_thread()
        if thread.is_current():
            return work()
        done: Future[_Made] = Future()
        thread.mail.put(_Work(owner=OWNER.get(), call=partial(_settle, done, work)))
        try:
            return done.result()
        finally:
            done.cancel()  # of a caller who was interrupted while it waited

    def run_when_idle(self, work: IdleWork) -> None:
        """Have ``work`` done on the model's thread once nothing else is to do.

        It is given a check to call often, which raises as soon as something else comes; it is then
        begun again later. What it raises otherwise is logged.
        """
        thread = self._running_thread()
        thread.idle.append(work)
        thread.mail.put(None)

    def finish_idle(self) -> None:
        """Do all work that waits for idle time now."""
        thread = self._running_thread()
        self.run(lambda: thread.do_idle(lambda: None, most=len(thread.idle)))

    def _running_thread(self) -> _Thread:
        with self._starting:
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _Thread(self.limits)
                weakref.finalize(self, self._thread.stop)
            self._thread.n_torch_threads = torch.get_num_threads()
            return self._thread


IdleWork = Callable[[Callable[[], None]], None]
"""Work for idle time, given a check that raises `Abandoned` where something else is to do."""

MOST_IDLE = 64
"""Works that wait for idle time; the oldest makes room."""


def _settle(done: Future[_Made], work: Callable[[], _Made]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A pass of `Scheduler.run`."""

    owner: str
    call: Callable[[], None]


_threads: set[_Thread] = set()
"""Those that may be running. An interpreter that ends while one frees a model would abort."""


@cache
def _wait_for_threads_at_exit() -> None:
    def stop_all() -> None:
        for each in list(_threads):
            each.stop()

    atexit.register(stop_all)


class _Thread:
    """The thread of a scheduler, of which it holds nothing, so that it ends with it.

    mail: answers, work, and None for a change of either; from any thread. counting: is held to
    change n_waiting and running, the answers that have not begun, by owner, and those that have.
    pass_began: when the pass or step under way began; None while there is none.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.pid = os.getpid()
        self.n_torch_threads = torch.get_num_threads()
        self.mail: SimpleQueue[RunningAnswer | _Work | None] = SimpleQueue()
        self.counting = threading.Lock()
        self.n_waiting = Counter[str]()
        self.running: list[RunningAnswer] = []
        self.pass_began: float | None = None
        self.idle: deque[IdleWork] = deque(maxlen=MOST_IDLE)
        self._queue: deque[RunningAnswer | _Work] = deque()
        # start-time fair queueing (Goyal, Vin and Cheng, 1996), in seconds of the model's time
        self._clock = 0.0
        self._used: dict[str, float] = {}
        # what `run` has had of it since an owner's answers had as much, in seconds
        self._ahead: dict[str, float] = {}
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve, name="samkv-model", daemon=True)
        self._thread.start()
        _wait_for_threads_at_exit()
        for each in list(_threads):
            if not each._thread.is_alive():
                _threads.discard(each)
        _threads.add(self)

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread after the step that it is at."""
        self._is_stopped = True
        self.mail.put(None)
        if not self.is_current() and self.pid == os.getpid():
            self._thread.join()

    def _serve(self) -> None:
        with torch.inference_mode():
            while not self._is_stopped:
                self._read_mail()
                self._drop()
                if torch.get_num_threads() != self.n_torch_threads:  # each thread has its own
                    torch.set_num_threads(self.n_torch_threads)
                self._do_next()
                self._step()
                self._drop()
                if self.idle and self._has_nothing_to_do():
                    self.do_idle(self._check_idle)

    def _read_mail(self) -> None:
        """Take what has come; wait for it if there is nothing to do."""
        is_idle = self._has_nothing_to_do() and not self.idle
        while True:
            try:
                letter = self.mail.get(block=is_idle)
            except Empty:
                return
            is_idle = False
            if letter is not None:
                self._queue.append(letter)

    def _has_nothing_to_do(self) -> bool:
        return not self._batch() and self._next() is None

    def _check_idle(self) -> None:
        if self._is_stopped or not self.mail.empty():
            raise Abandoned

    def do_idle(self, check: Callable[[], None], most: int = 1) -> None:
        """Do the first works that wait for idle time."""
        for _ in range(min(most, len(self.idle))):
            work = self.idle.popleft()
            try:
                work(check)
            except Abandoned:
                self.idle.append(work)
                return
            except Exception:
                _log.exception("work in idle time failed; answers are none the worse for it")

    def _drop(self) -> None:
        """Let go of answers of which nothing more is computed."""
        for letter in list(self._queue):
            if isinstance(letter, RunningAnswer) and letter.is_abandoned:
                self._queue.remove(letter)
                self._end(letter)
        for answer in list(self.running):
            if answer.is_complete or answer.is_abandoned:
                self.running.remove(answer)
                answer.release()

    def _end(self, answer: RunningAnswer) -> None:
        """Let go of one that has not begun."""
        with self.counting:
            self.n_waiting -= Counter([answer.owner])  # which forgets owners who have none
        answer.release()

    def _batch(self) -> list[RunningAnswer]:
        """The answers of the next step: those that are `AHEAD` of their readers stand aside.

        The first of each owner, then the second of each, as many as there are places.
        """
        seen, ranked = Counter[str](), list[tuple[int, RunningAnswer]]()
        for each in self.running:
            if not (each.is_complete or each.is_abandoned) and len(each.pieces) < AHEAD:
                ranked.append((seen[each.owner], each))
                seen[each.owner] += 1
        ranked.sort(key=lambda one: one[0])
        return [each for _, each in ranked[: self._limits.max_batch]]

    def _next(self) -> int | None:
        """Where in the queue that stands which comes next: an answer in its turn, or a work.

        The owner who has had the model for the least time comes first. One who has had it for
        longer than another whose answers are under way waits for those. A full batch takes an
        answer more of an owner who has two places fewer than another.
        """
        limits, queue, batch = self._limits, self._queue, self._batch()
        has_room = True
        n_running = Counter(each.owner for each in batch)
        fullest = max(n_running.values(), default=0)
        owners = {*n_running, *(each.owner for each in queue)}
        self._clock = min(map(self._start_of, owners), default=self._clock)
        least = min(map(self._start_of, n_running), default=math.inf)
        most = limits.max_batch if len(owners) == 1 else max(1, limits.max_batch // 2)
        for at in sorted(range(len(queue)), key=lambda at: self._start_of(queue[at].owner)):
            letter = queue[at]
            if self._start_of(letter.owner) > least:
                return None
            if isinstance(letter, _Work):
                if n_running[letter.owner] and self._ahead.get(letter.owner, 0.0) > 0:
                    continue
                return at
            mine = n_running[letter.owner]
            if mine >= most or (len(batch) >= limits.max_batch and mine + 2 > fullest):
                continue
            if has_room and (
                limits.max_kv_bytes is None or not self.running
                or sum(each.kv_bytes for each in (*self.running, letter)) <= limits.max_kv_bytes
            ):  # fmt: skip
                return at
            has_room = False  # a smaller one does not overtake
        return None

    def _start_of(self, owner: str) -> float:
        return max(self._clock, self._used.get(owner, 0.0))

    def _charge(self, owner: str, seconds: float) -> None:
        """An owner has had the model for so long."""
        self._used = {each: used for each, used in self._used.items() if used > self._clock}
        self._used[owner] = self._start_of(owner) + seconds
        if owner in self._ahead:
            self._ahead[owner] -= seconds

    def _do_next(self) -> None:
        """What takes longer than a step: a pass of `run`, or the first one of an answer."""
        if (at := self._next()) is None:
            return
        letter = self._queue[at]
        del self._queue[at]
        self.pass_began = began = time.perf_counter()
        self._begin(letter)
        self.pass_began = None
        seconds = time.perf_counter() - began
        self._charge(letter.owner, seconds)
        if isinstance(letter, _Work):
            self._ahead[letter.owner] = seconds

    def _begin(self, letter: RunningAnswer | _Work) -> None:
        if isinstance(letter, _Work):
            letter.call()
            return
        try:
            letter.begin()
        except Abandoned:
            self._end(letter)
        except BaseException as error:
            self._end(letter)
            letter.fail(error)
        else:
            with self.counting:
                self.n_waiting -= Counter([letter.owner])
                self.running.append(letter)

    def _step(self) -> None:
        """One token more for each answer of a batch."""
        if not (batch := self._batch()):
            return
        self.pass_began = began = time.perf_counter()
        decoders, tokens = [], []
        for answer in batch:
            assert answer.decoder is not None
            decoders.append(answer.decoder)
            tokens.append(answer.token)
        try:
            logits = decode(decoders, tokens)
        except BaseException as error:
            for answer in batch:
                answer.fail(error)
            return
        finally:
            self.pass_began = None
        seconds = time.perf_counter() - began
        for answer, of_one in zip(batch, logits, strict=True):
            self._charge(answer.owner, seconds / len(batch))
            assert answer.sampler is not None
            try:
                answer.take(answer.sampler.next(of_one), seconds)
            except BaseException as error:
                answer.fail(error)
        if len(self.running) > len(batch):  # who has been passed over comes first the next time
            self.running = [each for each in self.running if each not in batch] + batch

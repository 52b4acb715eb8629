"""The scheduler: one thread that runs the model, and decodes several answers in each step."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from samkv_integrations.errors import Given, InvalidOption, OutOfMemory, Overloaded
from samkv_integrations.plan.first_token import first_token
from samkv_integrations.plan.kept_sequences import KeptSequence
from samkv_integrations.plan.request import Request
from samkv_integrations.report import Report, Stage
from samkv_integrations.runtimes.transformers.entries.hot import HotChunks
from samkv_integrations.runtimes.transformers.model.model import Model
from samkv_integrations.runtimes.transformers.passes.decode import Decoder, TextStream, decode
from samkv_integrations.runtimes.transformers.passes.working_cache import FirstEntries
from samkv_integrations.runtimes.transformers.sampling import Sampler
from samkv_integrations.serving.draft import MOST_ROWS, PromptLookup, RowCosts

_Made = TypeVar("_Made")

OWNER: ContextVar[str] = ContextVar("samkv_owner", default="")
"""Who asks, for example an API key of a server. Owners share the model's time equally."""

AHEAD = 32
"""Pieces that an answer may be ahead of its reader; then it is paused."""

FinishReason = Literal["stop", "length"]

PASS_SHARE = 4
"""A pass takes so many times as long as the steps that interrupt it."""

LEAST_PART_S = 0.005
"""Seconds of a pass between two interruptions, at least."""

WORK_TOKENS = 1024
"""Tokens that a call of `Scheduler.run` is taken to compute: about a batch of chunks."""


class Abandoned(Exception):
    """Nobody reads the answer any more; raised inside a pass to end it."""


class NothingCame(Exception):
    """The time in which a reader waits for a piece is over."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that is final, empty in the first and the last piece, and the report up to there.

    finish_reason: how the answer ended; None while it goes on.
    """

    text: str
    report: Report
    finish_reason: FinishReason | None = None


class Pieces:
    """A queue from the model's thread to the single reader of an answer, a thread or a task.

    `put` never blocks. Reading waits at most ``timeout`` seconds, then raises NothingCame; it
    raises an error that was put.
    """

    def __init__(self) -> None:
        # the last item has not come yet
        self._items: deque[Future[Piece | BaseException]] = deque([Future()])

    def __len__(self) -> int:
        return len(self._items) - 1

    def put(self, item: Piece | BaseException) -> None:
        """Add a piece or an error, and wake the reader."""
        coming = self._items[-1]
        self._items.append(Future())
        coming.set_result(item)

    def next(self, timeout: float | None = None) -> Piece:
        """The next piece."""
        try:
            item = self._items[0].result(timeout)
        except TimeoutError:
            raise NothingCame from None
        self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    async def anext(self, timeout: float | None = None) -> Piece:
        """Like `next`, for a task; occupies no thread while it waits."""
        coming = self._items[0]
        if not coming.done():
            # shielded: cancelling the task must not cancel the piece
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(coming)), timeout)
            except TimeoutError:
                raise NothingCame from None
        return self.next()


class RunningAnswer:
    """One answer, from a waiting request to its last token.

    The model's thread calls `begin`, `draft` and `advance`, and `fail` if one of them raises.

    owner: who asks, see `OWNER`. n_computed: tokens that the first token's pass computes, about.
    pieces: for the reader; the first one is empty and comes with the first token.
    is_complete: the last piece has been put. is_abandoned: set by a reader that has left. decoder,
    sampler: for the tokens after the first; None before it and at the end. lookup: drafts tokens;
    None if nothing is drafted. token: the next input of the model.
    """

    _report: Report  # of the first token
    _kept: KeptSequence[FirstEntries] | None = None  # the prompt, in memory

    def __init__(self, request: Request) -> None:
        self.request, self.owner = request, OWNER.get()
        n_prompt = len(request.resolved.token_ids)
        cached = [one.n_tokens for one in request.resolved.chunks if one.stored is not None]
        share = request.method.recompute.most_ratio(sum(cached), len(cached))
        self.n_computed = max(1, n_prompt - request.n_held - int((1 - share) * sum(cached)))
        self.kv_bytes = (n_prompt + request.capacity) * request.model.token_kv_bytes  # at most
        self.pieces = Pieces()
        self.is_complete = self.is_abandoned = False
        self.decoder: Decoder | None = None
        self.sampler: Sampler | None = None
        self.lookup: PromptLookup | None = None
        self.token = self._n_tokens = self._n_steps = self._n_decoded = 0
        self._tokens: list[int] = []
        self._is_unsure = False  # the last step computed several tokens, and none is certain
        self._decode_s = 0.0
        self._text = TextStream(request.model, request.settings.stop)

    def begin(self, between_layers: Callable[[], None]) -> None:
        """Compute the first token. Raises Abandoned if the reader leaves meanwhile.

        between_layers: called before each layer, on a CPU. A GPU's layers are only queued.
        """
        request, model = self.request, self.request.model
        began, is_on_cpu = time.perf_counter(), model.device.type == "cpu"

        def check() -> None:
            if self.is_abandoned:
                raise Abandoned
            if is_on_cpu:
                between_layers()

        request.stages += (
            Stage(name="read", began=request.began, ended=request.asked),
            Stage(name="wait", began=request.asked, ended=began),
        )
        with closing(request.resolved), model.interruptible(check):
            first = first_token(request)
            ids = first.layout.token_ids.tolist()
            self.sampler = Sampler(model, ids, request.settings.sampling, request.form)
            token = self.sampler.next(first.logits)
        self._report = replace(
            first.report, wait_s=began - request.asked, announce_s=request.announce_s,
            ttft_s=time.perf_counter() - request.began,
        )  # fmt: skip
        self.decoder, self._kept = Decoder(model, first.cache, first.layout.n_tokens), first.kept
        if request.settings.draft and first.cache.can_rewind:
            self.lookup = PromptLookup(ids)
        self._put("")
        self._take(token)

    def draft(self, most: int) -> list[int]:
        """Tokens that may follow `token`, at most ``most``, to be checked by the next step."""
        if self.lookup is None or self._is_unsure or not self.lookup.has_any:
            return []
        most = min(most, self.request.settings.draft, self.request.capacity - self._n_tokens - 1)
        costs = RowCosts.of(self.request.model)
        if costs.tolerance and not self.request.settings.sampling.is_greedy:
            return []  # a draw near a limit would depend on the last bits
        return self.lookup.draft(costs.relative, most)

    def advance(self, drafted: Sequence[int], logits: Tensor, seconds: float) -> None:
        """Add the tokens that a step gave, up to the first one that was not drafted.

        logits: (1 + drafted, vocabulary), after `token` and after each of the drafted tokens. Each
        token is chosen as if the step had been its own, so neither a greedy nor a sampled answer
        depends on drafts.
        """
        assert self.decoder is not None and self.sampler is not None
        self._decode_s += seconds
        self._n_steps += 1
        chosen = list[int]()
        tolerance = RowCosts.of(self.request.model).tolerance if drafted else 0.0
        for of_token, expected in zip(logits, [*drafted, None], strict=True):
            token = self.sampler.next_if_sure(of_token, tolerance)
            if token is not None:
                chosen.append(token)
            if token is None or token != expected or token in self.request.end_ids:
                break
        self._is_unsure = not chosen
        if n_wrong := len(logits) - len(chosen):
            self.decoder.rewind(n_wrong)
        for token in chosen:
            self._n_decoded += 1
            self._take(token)
            if self.is_complete:
                break

    def _take(self, token: int) -> None:
        """Add the next token."""
        self.token = token
        self._tokens.append(token)
        if self.lookup is not None:
            self.lookup.add(token)
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
            self._keep()  # before its reader, who may ask again at once, sees the end
            self._put("", reason)

    def _keep(self) -> None:
        """Keep the entries of the answer behind those of the prompt, as far as computed."""
        if self._kept is None or self.decoder is None:
            return
        request, prompt = self.request, self._kept
        self.decoder.cache.put_back()
        n_decoded = self.decoder.position - len(prompt.token_ids)
        answered = np.array(self._tokens[:n_decoded], np.int64)
        token_ids = np.append(prompt.token_ids, answered)
        from_cache = np.append(prompt.from_cache, np.zeros(n_decoded, np.bool_))
        is_exact = prompt.n_exact == len(prompt.token_ids) and not request.model.decodes_packed
        kept = replace(
            prompt, token_ids=token_ids, from_cache=from_cache,
            n_exact=len(token_ids) if is_exact else prompt.n_exact, n_bytes=prompt.entries.n_bytes,
        )  # fmt: skip
        self._kept = None
        self._report = replace(self._report, stays=request.keep(kept))

    def fail(self, error: BaseException) -> None:
        """Pass ``error`` to the reader, after the pieces that are there."""
        self.is_complete = True
        if self._kept is not None:  # its tensors have grown with the answer
            self.request.drop(self._kept)
            self._kept = None
        if self.decoder is not None:
            self._put("")  # the figures so far
        if isinstance(error, torch.OutOfMemoryError):
            error = OutOfMemory.on(self.request.model.device)
        self.pieces.put(error)

    def release(self) -> None:
        """Free its caches; nothing more is computed. What an abandoned answer computed is kept."""
        self._keep()
        if self.decoder is None:
            self.request.resolved.close()
        self.decoder = self.sampler = None

    def _put(self, text: str, finish_reason: FinishReason | None = None) -> None:
        assert self.decoder is not None
        n_later = self._n_tokens - 1
        report = replace(
            self._report, completion_tokens=self._n_tokens,
            decode_kv_bytes=self.decoder.cache.kv_bytes,
            decode_tokens_per_s=n_later / self._decode_s if self._decode_s else 0.0,
            tokens_per_step=self._n_decoded / self._n_steps if self._n_steps else 0.0,
        )  # fmt: skip
        self.pieces.put(Piece(text=text, report=report, finish_reason=finish_reason))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a scheduler.

    max_batch: answers decoded in one step. With 1, they are computed one after another.
    max_kv_bytes: KV entries that the running answers may need, each with its full prompt and all
        its tokens; None for no limit. A single answer above the limit is computed alone.
    max_waiting: answers of one owner that may wait for their first token; None for no limit.
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
                Given(name, value),
                f"; it must be a whole number of at least {least}"
                f"{', or None' if may_be_none else ''}",
            )


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

    Between two decoding steps it does at most one longer piece of work: the first token of the next
    answer, or a call of `run`, after which the running answers of the same owner get as much time.
    On a CPU steps go on between the layers of its passes. A first token comes there, too, if its
    owner has used less time, and it computes half as many tokens as the pass at most. Several
    owners (see `OWNER`) share the time equally: none begins an answer beyond half of the places of
    a batch, and an owner that has more answers than places alternates between them. Answers of one
    owner begin in the order in which they came. An answer whose reader is `AHEAD` pieces behind is
    paused, and its place goes to another one.

    The thread starts with the first work, and ends with the scheduler. Thread-safe, and usable
    after a fork that happened while no other thread used it.
    """

    def __init__(self, model: Model, limits: Limits | None = None) -> None:
        self.model = model
        self.limits = limits or Limits()
        self._starting = threading.Lock()
        self._thread: _Thread | None = None

    @classmethod
    def of(cls, model: Model, given: Scheduler | None) -> Scheduler:
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
            thread.mail.put(answer)  # before it is counted: a counted answer can be begun
            thread.n_waiting[answer.owner] += 1

    def wake(self) -> None:
        """Tell the thread that an answer was abandoned or read. Takes no lock."""
        if self._thread is not None:
            self._thread.mail.put(None)

    def run(self, work: Callable[[], _Made], *, may_pause: bool = False) -> _Made:
        """Run ``work`` in the model's thread, without gradients; returns or raises what it does.

        may_pause: whether other answers go on between the layers of its passes, on a CPU.
        """
        thread = self._running_thread()
        if threading.current_thread() is thread.thread:
            return work()
        done: Future[_Made] = Future()

        def call() -> None:
            if not done.set_running_or_notify_cancel():
                return
            pauses = may_pause and self.model.device.type == "cpu"
            others = self.model.interruptible(thread.between_layers) if pauses else nullcontext()
            try:
                with others:
                    done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        thread.mail.put(_Work(owner=OWNER.get(), call=call))
        try:
            return done.result()
        finally:
            done.cancel()  # if the caller was interrupted while it waited

    def _running_thread(self) -> _Thread:
        with self._starting:
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _Thread(self.limits)
                weakref.finalize(self, self._thread.stop)
            self._thread.n_torch_threads = torch.get_num_threads()
            return self._thread


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A call of `Scheduler.run`."""

    owner: str
    call: Callable[[], None]


@dataclass(kw_only=True)
class _Doing:
    """A longer piece of work that runs. seconds: charged to its owner, up to the time ``until``."""

    letter: RunningAnswer | _Work
    until: float
    seconds: float = 0.0


def _is_shorter(letter: RunningAnswer | _Work, doing: RunningAnswer | _Work) -> bool:
    """Whether it is a first token, which computes half as much as ``doing`` at most."""
    if not isinstance(letter, RunningAnswer):
        return False
    n_tokens = doing.n_computed if isinstance(doing, RunningAnswer) else WORK_TOKENS
    return 2 * letter.n_computed <= n_tokens


class _Thread:
    """The thread of a scheduler. It holds no reference to it, and ends when it is collected.

    mail: new answers and work from any thread; None if something has changed. counting: the lock
    for n_waiting (owner -> answers that have not begun) and running (those that have).
    pass_began: when the current pass or step began; None without one.
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
        self._queue: deque[RunningAnswer | _Work] = deque()
        # start-time fair queueing (Goyal, Vin and Cheng, 1996), in seconds of the model's time
        self._clock = 0.0
        self._used: dict[str, float] = {}
        # seconds that an owner's `run` is ahead of its answers
        self._ahead: dict[str, float] = {}
        self._doing: _Doing | None = None  # what may be interrupted
        self._paused: _Doing | None = None  # what is interrupted now
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
        self.mail.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _serve(self) -> None:
        is_busy = True
        with torch.inference_mode():
            while not self._is_stopped:
                self._read_mail(wait=not is_busy)
                self._drop()
                if torch.get_num_threads() != self.n_torch_threads:  # each thread has its own
                    torch.set_num_threads(self.n_torch_threads)
                has_begun, has_stepped = self._do_next(), self._step()
                is_busy = has_begun or has_stepped
        atexit.unregister(self.stop)

    def _read_mail(self, *, wait: bool) -> None:
        """Move the mail to the queue. wait: until there is some."""
        while True:
            try:
                letter = self.mail.get(block=wait)
            except Empty:
                return
            wait = False
            if letter is not None:
                self._queue.append(letter)

    def _drop(self) -> None:
        """Remove answers that are complete or abandoned."""
        for letter in list(self._queue):
            if isinstance(letter, RunningAnswer) and letter.is_abandoned:
                self._queue.remove(letter)
                self._end(letter)
        for answer in list(self.running):
            if answer.is_complete or answer.is_abandoned:
                self.running.remove(answer)
                answer.release()

    def _end(self, answer: RunningAnswer) -> None:
        """Remove an answer that has not begun."""
        with self.counting:
            self.n_waiting -= Counter([answer.owner])  # which drops owners at 0
        answer.release()

    def _batch(self) -> list[RunningAnswer]:
        """The answers of the next step, without those that are `AHEAD` of their readers.

        The first answer of each owner, then the second of each, up to ``max_batch``.
        """
        seen, ranked = Counter[str](), list[tuple[int, RunningAnswer]]()
        for each in self.running:
            if not (each.is_complete or each.is_abandoned) and len(each.pieces) < AHEAD:
                ranked.append((seen[each.owner], each))
                seen[each.owner] += 1
        ranked.sort(key=lambda one: one[0])
        return [each for _, each in ranked[: self._limits.max_batch]]

    def _next(self) -> int | None:
        """The index in the queue of the answer or work that comes next; None for none.

        The owner that has used the least model time comes first. An owner that has used more than
        one with running answers waits for those. A full batch takes one more answer of an owner
        that has at least two places fewer than another.
        """
        limits, queue, batch = self._limits, self._queue, self._batch()
        begun, has_room = [*self.running], True
        paused = [] if self._paused is None else [self._paused.letter]
        for each in paused:
            if isinstance(each, RunningAnswer):
                begun.append(each)
                batch.append(each)
        n_running = Counter(each.owner for each in batch)
        fullest = max(n_running.values(), default=0)
        owners = {*n_running, *(each.owner for each in (*queue, *paused))}
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
                limits.max_kv_bytes is None or not begun
                or sum(each.kv_bytes for each in (*begun, letter)) <= limits.max_kv_bytes
            ):  # fmt: skip
                return at
            has_room = False  # a smaller answer does not overtake
        return None

    def _start_of(self, owner: str) -> float:
        return max(self._clock, self._used.get(owner, 0.0))

    def _charge(self, owner: str, seconds: float) -> None:
        """Count model time of an owner."""
        self._used = {each: used for each, used in self._used.items() if used > self._clock}
        self._used[owner] = self._start_of(owner) + seconds
        if owner in self._ahead:
            self._ahead[owner] -= seconds

    def _do_next(self) -> bool:
        """Do what takes longer than a step, if there is something. Returns False if not."""
        if (at := self._next()) is None:
            return False
        self._do(at)
        return True

    def _do(self, at: int) -> None:
        """Do what is in the queue there: a call of `run`, or the first token of an answer."""
        letter = self._queue[at]
        del self._queue[at]
        self.pass_began = time.perf_counter()
        self._doing = doing = _Doing(letter=letter, until=self.pass_began)
        if isinstance(letter, _Work):
            letter.call()
        else:
            try:
                letter.begin(self.between_layers)
            except Abandoned:  # nobody reads it, and it would keep what the pass computed with
                self._end(letter)
            except BaseException as error:
                self._end(letter)
                letter.fail(error)
            else:
                with self.counting:
                    self.n_waiting -= Counter([letter.owner])
                    self.running.append(letter)
        self.pass_began = self._doing = None
        self._account(doing)
        if isinstance(letter, _Work):
            self._ahead[letter.owner] = doing.seconds

    def _account(self, doing: _Doing) -> None:
        """Charge the time since ``doing.until`` to its owner."""
        now = time.perf_counter()
        self._charge(doing.letter.owner, now - doing.until)
        doing.seconds += now - doing.until
        doing.until = now

    def between_layers(self) -> None:
        """Let other answers go on for a moment, while a longer piece of work runs.

        A first token comes first if its owner has used less time than that of the work, and if it
        is short: the work goes on behind it. Then comes a step: if one of its owners has used less
        time, or if the last step is `PASS_SHARE` times its own seconds ago.
        """
        doing, now = self._doing, time.perf_counter()
        if doing is None or now - doing.until < LEAST_PART_S or self._is_stopped:
            return
        self._account(doing)
        outer, self._doing, self._paused = self._paused, None, doing
        try:
            self._read_mail(wait=False)
            self._drop()
            used = self._start_of(doing.letter.owner)
            at = self._next() if outer is None else None
            if at is not None and _is_shorter(self._queue[at], doing.letter):
                if self._start_of(self._queue[at].owner) < used:
                    self._do(at)
            is_due = now - self._step_ended > PASS_SHARE * self._step_s
            if is_due or any(self._start_of(each.owner) < used for each in self._batch()):
                self._step()
        finally:
            self._doing, self._paused = doing, outer
            doing.until = time.perf_counter()
            self.pass_began = doing.until - doing.seconds

    def _step(self) -> bool:
        """Decode one token of each answer in the batch, and what can be drafted.

        If the device has no memory for it, each answer is tried once more, alone and without hot
        chunks. Returns False if there is no such answer.
        """
        if not (batch := self._batch()):
            return False
        if len(self.running) > len(batch):  # the others come first the next time
            self.running = [each for each in self.running if each not in batch] + batch
        began = time.perf_counter()
        is_done = self._decode(batch)
        self._step_ended = time.perf_counter()
        self._step_s = self._step_ended - began
        if is_done:
            return True
        HotChunks.clear_all()
        for answer in batch:
            answer.request.free_kept()
        for answer in batch:
            assert answer.decoder is not None
            # what a rule evicts during a step cannot be taken back
            if not (answer.decoder.cache.can_rewind and self._decode([answer])):
                answer.fail(torch.OutOfMemoryError())
                self.running.remove(answer)
                answer.release()  # its memory, for the others
        return True

    def _decode(self, batch: list[RunningAnswer]) -> bool:
        """A step of these answers; False, before any has changed, if the device has no memory."""
        self.pass_began = time.perf_counter()
        decoders, tokens = [], []
        try:
            most = MOST_ROWS // len(batch) - 1
            for answer in batch:
                assert answer.decoder is not None
                drafted = answer.draft(most) if most > 0 else []
                decoders.append(answer.decoder)
                tokens.append([answer.token, *drafted])
            began = time.perf_counter()
            logits = decode(decoders, tokens)
        except torch.OutOfMemoryError:
            return False
        except BaseException as error:
            for answer in batch:
                answer.fail(error)
            return True
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
            self._charge(answer.owner, seconds / len(batch) + own_s)
        return True

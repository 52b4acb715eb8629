"""Turns: which job the model's thread runs next, and which answers it decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.serving.answers import RunningAnswer

AHEAD = 32
"""Pieces that an answer may be ahead of its reader; then it is paused."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A job that runs a function, see `Scheduler.run`. fail: raises an error for its caller."""

    owner: str
    call: Callable[[], None]
    fail: Callable[[BaseException], None]


Job = RunningAnswer | Call
"""A unit of work that waits for the model's thread: the first token of an answer, or a call."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a scheduler.

    max_batch: answers decoded in one step. With 1, they are computed one after another.
    max_kv_bytes: KV entries that the running answers may need, each with its full prompt and all
        its tokens; None for no limit. A single answer above the limit is computed alone.
    max_waiting: answers of one owner that may wait for their first token; None for no limit.
    max_running: answers that run at the same time, those included that wait for their readers;
        None for no limit.
    """

    max_batch: int = 8
    max_kv_bytes: int | None = None
    max_waiting: int | None = None
    max_running: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_batch", 1), ("max_kv_bytes", 1), ("max_waiting", 0), ("max_running", 1)
        ):  # fmt: skip
            value, may_be_none = getattr(self, name), name != "max_batch"
            if type(value) is int and value >= least or (value is None and may_be_none):
                continue
            raise InvalidOption(
                Given(name, value),
                f"; it must be a whole number of at least {least}"
                f"{', or None' if may_be_none else ''}",
            )

    def within(self, kv_room: int | None, most_running: int | None) -> Limits:
        """With the limits of a runtime, see `Runtime.kv_room` and `Runtime.most_running`."""
        return replace(
            self, max_kv_bytes=_least(self.max_kv_bytes, kv_room),
            max_running=_least(self.max_running, most_running),
        )  # fmt: skip

    def have_room(self, running: Sequence[RunningAnswer], answer: RunningAnswer) -> bool:
        """Whether one more answer can run beside the others."""
        if self.max_running is not None and len(running) >= self.max_running:
            return False
        if self.max_kv_bytes is None or not running:
            return True
        return sum(each.kv_bytes for each in (*running, answer)) <= self.max_kv_bytes


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


class Turns:
    """Jobs run in the order in which they came.

    After a call, the next call waits until running answers have had as much model time.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._owed_s = 0.0  # to the running answers

    def batch(self, running: Sequence[RunningAnswer]) -> list[RunningAnswer]:
        """The answers of the next step: the first ones whose readers are not too far behind."""
        return [each for each in running if is_read(each)][: self.limits.max_batch]

    def next(
        self, waiting: Sequence[Job], running: Sequence[RunningAnswer], paused: Job | None
    ) -> Job | None:
        """The job to run now; None for none. paused: the job in whose pause it would run."""
        own = [paused] if isinstance(paused, RunningAnswer) else []
        batch, begun = self.batch(running) + own, [*running, *own]
        may_call, may_begin = not batch or self._owed_s <= 0, len(batch) < self.limits.max_batch
        for job in waiting:
            if isinstance(job, Call):
                if may_call:
                    return job
            elif may_begin:
                if self.limits.have_room(begun, job):
                    return job
                may_begin = False  # a smaller answer does not overtake
        return None

    def charge(self, owner: str, seconds: float) -> None:
        """Charge an owner the model time of its jobs and tokens."""
        self._owed_s -= seconds

    def has_called(self, owner: str, seconds: float) -> None:
        """Note how long a call of an owner took."""
        self._owed_s = seconds

    def may_interrupt(self, job: Job, current: Job) -> bool:
        """Whether a job may run in a pause of another one."""
        return False

    def is_owed_a_step(self, batch: Sequence[RunningAnswer], current: Job) -> bool:
        """Whether this pause of a job must have a step, even if one has just ended."""
        return False


def is_read(answer: RunningAnswer) -> bool:
    """Whether an answer goes on: it has not ended, and is less than `AHEAD` pieces ahead."""
    return not (answer.is_complete or answer.is_abandoned) and len(answer.pieces) < AHEAD

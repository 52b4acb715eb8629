"""Fair turns: several owners, such as the API keys of a server, share the model's time equally."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from samkv_integrations.serving.answers import RunningAnswer
from samkv_integrations.serving.turns import Call, Job, Limits, Turns, is_read

CALL_TOKENS = 1024
"""Tokens that a call is assumed to compute: about a batch of chunks."""


class FairTurns(Turns):
    """The owner that has used the least model time comes first.

    No owner begins an answer beyond half of the places in a batch, and an owner with more answers
    than places alternates between them. Answers of one owner begin in the order in which they came.
    Between two parts of a pass a waiting prompt may run first, if its owner has used less model
    time and it needs at most half as many tokens.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996), in seconds of the model's time.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._clock = 0.0
        self._used: dict[str, float] = {}
        self._owed: dict[str, float] = {}  # owner -> seconds of its calls due to its answers

    def batch(self, running: Sequence[RunningAnswer]) -> list[RunningAnswer]:
        """The first answer of each owner, then the second of each, up to ``max_batch``."""
        seen, ranked = Counter[str](), list[tuple[int, RunningAnswer]]()
        for each in filter(is_read, running):
            ranked.append((seen[each.owner], each))
            seen[each.owner] += 1
        ranked.sort(key=lambda one: one[0])
        return [each for _, each in ranked[: self.limits.max_batch]]

    def next(
        self, waiting: Sequence[Job], running: Sequence[RunningAnswer], paused: Job | None
    ) -> Job | None:
        """The first job of the owner that has used the least time.

        An owner waits while an owner of running answers has used less. A full batch takes one more
        answer of an owner that has at least two answers fewer in it than another.
        """
        own = [paused] if isinstance(paused, RunningAnswer) else []
        batch, begun, has_room = self.batch(running) + own, [*running, *own], True
        n_running = Counter(each.owner for each in batch)
        fullest = max(n_running.values(), default=0)
        owners = {*n_running, *(job.owner for job in waiting)}
        if paused is not None:
            owners.add(paused.owner)
        self._clock = min(map(self._start_of, owners), default=self._clock)
        least = min(map(self._start_of, n_running), default=math.inf)
        max_batch = self.limits.max_batch
        most = max_batch if len(owners) == 1 else max(1, max_batch // 2)
        for job in sorted(waiting, key=lambda job: self._start_of(job.owner)):
            if self._start_of(job.owner) > least:
                return None
            mine = n_running[job.owner]
            if isinstance(job, Call):
                if mine and self._owed.get(job.owner, 0.0) > 0:
                    continue
                return job
            if mine >= most or (len(batch) >= max_batch and mine + 2 > fullest):
                continue
            if has_room and self.limits.have_room(begun, job):
                return job
            has_room = False  # a smaller answer does not overtake
        return None

    def _start_of(self, owner: str) -> float:
        return max(self._clock, self._used.get(owner, 0.0))

    def charge(self, owner: str, seconds: float) -> None:
        self._used = {each: used for each, used in self._used.items() if used > self._clock}
        self._used[owner] = self._start_of(owner) + seconds
        if owner in self._owed:
            self._owed[owner] -= seconds

    def has_called(self, owner: str, seconds: float) -> None:
        self._owed[owner] = seconds

    def may_interrupt(self, job: Job, current: Job) -> bool:
        if not isinstance(job, RunningAnswer):
            return False
        n_tokens = current.n_computed if isinstance(current, RunningAnswer) else CALL_TOKENS
        is_short = 2 * job.n_computed <= n_tokens
        return is_short and self._start_of(job.owner) < self._start_of(current.owner)

    def is_owed_a_step(self, batch: Sequence[RunningAnswer], current: Job) -> bool:
        used = self._start_of(current.owner)
        return any(self._start_of(each.owner) < used for each in batch)

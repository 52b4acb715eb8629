"""Ways of doing the same, one after the other in one process: seconds, and ratios to one of them.

A machine that others use is slower for a while, and then for both members of a pair, so ratios are
of pairs, and CPU seconds stand beside wall time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """CPU seconds of all threads of this process, and seconds of wall time."""

    cpu: float
    wall: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of some figures, with their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def seconds_of(work: Callable[[], object]) -> Seconds:
    """What ``work`` takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Seconds(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall)


def taking_turns(
    ways: Mapping[str, Callable[[], object]], order: random.Random
) -> dict[str, Seconds]:
    """What each way takes, in random order."""
    names = order.sample(list(ways), len(ways))
    found = {name: seconds_of(ways[name]) for name in names}
    return {name: found[name] for name in ways}


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return Spread(median=median, low=low, high=high)


def ratios(mine: Sequence[Seconds], theirs: Sequence[Seconds]) -> tuple[Spread, Spread]:
    """The ratios within pairs, of CPU seconds and of wall time."""
    pairs = list(zip(mine, theirs, strict=True))
    return (
        spread([one.cpu / other.cpu for one, other in pairs]),
        spread([one.wall / other.wall for one, other in pairs]),
    )

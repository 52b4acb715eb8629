"""Which batches were begun how often: lives as long as the ingest, whichever worker is killed."""

from __future__ import annotations

from collections import Counter


class Attempts:
    """Counts the attempts at each batch; one for all workers, in a process of its own."""

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()
        self._ended: set[int] = set()

    def begin(self, number: int) -> int:
        """Which attempt at batch ``number`` this is, from 1; one that ended is begun no further.

        Ray repeats whole tasks, and a task may hold batches that were done before it was cut off.
        """
        if number not in self._ended:
            self._begun[number] += 1
        return self._begun[number]

    def end(self, number: int) -> None:
        """Batch ``number`` is done."""
        self._ended.add(number)

    def n_retried(self) -> int:
        """Batches that were begun more than once, because a worker went in the middle."""
        return sum(count > 1 for count in self._begun.values())

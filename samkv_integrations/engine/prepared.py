"""Chunks that an announcement computed, remembered for the report of the prompt that holds them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection

from samkv_integrations.prompt.resolve import Resolved

MAX_REMEMBERED = 4096


class Prepared:
    """Seconds that chunks took, by key, until a prompt claims them: the latest `MAX_REMEMBERED`.

    Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Collection[str], seconds: float) -> None:
        """Remember chunks that were computed in ``seconds`` together."""
        with self._lock:
            for key in keys:
                self._seconds[key] = seconds / len(keys)
                self._seconds.move_to_end(key)
            while len(self._seconds) > MAX_REMEMBERED:
                self._seconds.popitem(last=False)

    def claim(self, resolved: Resolved) -> float:
        """Mark the chunks of a prompt that were computed for it, and forget them.

        Returns the seconds that they took.
        """
        with self._lock:
            seconds = {
                chunk.key: self._seconds.pop(chunk.key)
                for chunk in resolved.chunks
                if chunk.key in self._seconds
            }
        for chunk in resolved.chunks:
            chunk.computed_now |= chunk.key in seconds
        return sum(seconds.values())

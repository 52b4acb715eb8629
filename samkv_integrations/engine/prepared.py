"""Chunks that an announcement computed, remembered for the report of the prompt that holds them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

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

    def claim(self, resolved: Resolved, key_of: Callable[[tuple[int, ...]], str]) -> float:
        """Mark the chunks of a prompt that were computed for it, and forget them.

        key_of: the key of a chunk of these token ids. Returns the seconds that they took.
        """
        if not self._seconds:
            return 0.0
        chunks = {each.token_ids for each in resolved.segments if each.is_context}
        keys = {token_ids: key_of(token_ids) for token_ids in chunks}
        with self._lock:
            seconds = {
                token_ids: self._seconds.pop(key)
                for token_ids, key in keys.items()
                if key in self._seconds
            }
        resolved.mark_computed(seconds)
        return sum(seconds.values())

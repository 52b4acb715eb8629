"""Keys of chunks that something was done with lately, each asked for once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

_MAX_KEYS = 2**16
"""Some 10 MB, and more chunks than one ingest adds at once."""


class RecentKeys:
    """A bounded set of keys: the oldest are forgotten. For many threads."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str]) -> None:
        """Remember these."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            while len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._keys.clear()

    def take(self, key: str) -> bool:
        """Whether a key is remembered; it is forgotten then."""
        with self._lock:
            return key in self._keys and self._keys.pop(key) is None

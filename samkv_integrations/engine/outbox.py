"""A queue from the model's thread to whoever reads an answer, in a thread or in a task."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Outbox(Generic[_Item]):
    """Items in order, each read once. Putting never waits; reading does, at most ``timeout``.

    A task that waits holds no thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[_Item] = deque()
        self._readers: list[Future[None]] = []

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item) -> None:
        """Add an item, and wake who waits for one."""
        with self._lock:
            self._items.append(item)
            readers, self._readers = self._readers, []
        for reader in readers:
            if reader.set_running_or_notify_cancel():  # False: nobody waits for it any more
                reader.set_result(None)

    def next(self, timeout: float | None = None) -> _Item:
        """The next item. Raises TimeoutError if there is none within ``timeout`` seconds."""
        while (reader := self._reader()) is not None:
            try:
                reader.result(timeout)
            except BaseException:
                reader.cancel()
                raise
        return self._items.popleft()

    async def anext(self, timeout: float | None = None) -> _Item:
        """Like `next`, for a task."""
        while (reader := self._reader()) is not None:
            # a cancelled task cancels the reader with it
            await asyncio.wait_for(asyncio.wrap_future(reader), timeout)
        return self._items.popleft()

    def _reader(self) -> Future[None] | None:
        """What is done when there may be an item; None if there is one now."""
        with self._lock:
            if self._items:
                return None
            reader: Future[None] = Future()
            self._readers.append(reader)
            return reader

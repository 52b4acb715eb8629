"""Long work of requests, a few at a time: the others wait in line and hold no thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from samkv_integrations.errors import Overloaded

_Made = TypeVar("_Made")


class Turns:
    """Lets requests do long work in turn. For one event loop.

    at_once: requests that work at a time. most_waiting: requests that may wait for that.
    """

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._most_waiting, self._n_waiting = most_waiting, 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A block that is entered when there is a place. Raises Overloaded if too many wait."""
        if self._places.locked() and self._n_waiting >= self._most_waiting:
            raise Overloaded(
                f"{self._n_waiting} requests wait already to cache or delete chunks; ask again "
                "later"
            )
        self._n_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._n_waiting -= 1
        try:
            yield
        finally:
            self._places.release()


async def to_its_end(work: Coroutine[Any, Any, _Made]) -> _Made:
    """What ``work`` returns or raises. A caller who is cancelled waits for its end all the same.

    For work in a thread, which goes on in any case: its place must not look free.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise

"""The deltas of an answer, computed off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol, TypeVar

_Delta = TypeVar("_Delta", covariant=True)


class Deltas(Iterator[_Delta], Protocol[_Delta]):
    """An answer that comes delta by delta, and can be ended before it is exhausted."""

    def close(self) -> None:
        """End it and free what it holds."""
        ...


async def off_loop(deltas: Deltas[_Delta]) -> AsyncGenerator[_Delta]:
    """Iterate in threads, so that the event loop is free while a delta is computed.

    However this ends, ``deltas`` is closed. A task that is cancelled waits for the delta that is
    being computed, which nothing can interrupt; after it nothing is computed any more.
    """
    turn = threading.Lock()

    def step() -> _Delta | None:
        with turn:
            return next(deltas, None)

    def close() -> None:
        with turn:
            deltas.close()

    try:
        while (delta := await asyncio.to_thread(step)) is not None:
            yield delta
    finally:
        await asyncio.shield(asyncio.to_thread(close))

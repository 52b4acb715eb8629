"""Pieces of an answer off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol, TypeVar

_Piece = TypeVar("_Piece", covariant=True)


class Pieces(Iterator[_Piece], Protocol[_Piece]):
    """What comes piece by piece, and can be ended before it is exhausted."""

    def close(self) -> None:
        """End it and free what it holds."""
        ...


async def off_loop(pieces: Pieces[_Piece]) -> AsyncGenerator[_Piece]:
    """Iterate in threads, so that the event loop is free while a piece is computed.

    However this ends, ``pieces`` is closed. A task that is cancelled waits for the piece under way,
    which nothing can interrupt; after it nothing is computed any more.
    """
    turn = threading.Lock()

    def step() -> _Piece | None:
        with turn:
            return next(pieces, None)

    def close() -> None:
        with turn:
            pieces.close()

    try:
        while (piece := await asyncio.to_thread(step)) is not None:
            yield piece
    finally:
        await asyncio.shield(asyncio.to_thread(close))

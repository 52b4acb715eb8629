"""A client's connection: answers end when it is gone, and nobody waits for one who is slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from samkv_integrations.errors import SamkvError
from samkv_integrations.server.failures import Failure, gone

SEND_S = 60.0
"""Seconds after which a client that reads nothing of a stream counts as gone."""

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""No cache keeps an answer, and nginx passes each event on as it comes."""

_Made = TypeVar("_Made")


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Made]) -> _Made:
    """What ``work`` returns or raises; cancelled when the client goes away, which is a Failure."""
    return await _until(work, request.receive)


async def _until(work: Coroutine[Any, Any, _Made], receive: Receive) -> _Made:
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise gone()
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        # the answer is left before this request is over
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one for each data that ``events`` gives.

    They end, and ``events`` is closed, when the client goes away or reads nothing for `SEND_S`. An
    error that ``events`` raises is the last one. The Failure of an early end is left in the
    request's state, under ``failure``.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):  # type: ignore[type-var]
                await _until(self._send(send), receive)
        except SamkvError as error:
            failure = Failure.of(error)
            await self._send_last(send, json.dumps(failure.body))
        except (Failure, TimeoutError):  # nobody is there to be told
            failure = gone()
        else:
            return
        scope["state"]["failure"] = failure

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for data in self._events:
            async with asyncio.timeout(SEND_S):
                await send(self._part(f"data: {data}\n\n".encode(), True))
        await send(self._part(b"", False))

    async def _send_last(self, send: Send, data: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_S):
                await send(self._part(f"data: {data}\n\n".encode(), False))

    @staticmethod
    def _part(body: bytes, more: bool) -> dict[str, Any]:
        return {"type": "http.response.body", "body": body, "more_body": more}

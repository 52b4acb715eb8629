"""Requests to an ASGI application, spoken to directly: a client may leave, stall, or dribble."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 60


@dataclass
class Exchange:
    """One request under way.

    blocked: sends wait while it is set, as for a client that reads nothing.
    """

    task: asyncio.Task[None] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    incoming: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    is_blocked: bool = False

    async def send(self, message: dict[str, Any]) -> None:
        if self.is_blocked:
            await asyncio.Event().wait()
        self.messages.append(message)
        async with self.arrived:
            self.arrived.notify_all()

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        """What the client sends; that it has gone is said as often as it is asked."""
        message = await self.incoming.get()
        if message["type"] == "http.disconnect":
            self.leave()
        return message

    async def wait_for(self, n_messages: int) -> None:
        """Wait until the application has sent so many, the head of the response included."""
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.messages) >= n_messages)

    async def end(self) -> Exchange:
        """Wait until the application has returned."""
        assert self.task is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.messages[0]["headers"]
        return {name.decode(): value.decode() for name, value in pairs}

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.body["error"])

    @property
    def events(self) -> list[Any]:
        """The data of its events, parsed but for the last, which must be ``[DONE]``."""
        data = [part.removeprefix("data: ") for part in self.text.split("\n\n") if part]
        assert data.pop() == "[DONE]"
        return [json.loads(each) for each in data]


class Client:
    """Asks an application. headers: of every request."""

    def __init__(self, app: Any, **headers: str) -> None:
        self._app = app
        self._headers = {"host": "localhost", "content-type": "application/json", **headers}

    def begin(
        self, method: str, path: str, parts: list[bytes], is_whole: bool = True, **headers: str
    ) -> Exchange:
        """A request whose body comes in these parts; not whole: and more that never comes."""
        exchange = Exchange()
        for place, part in enumerate(parts):
            more = not is_whole or place < len(parts) - 1
            exchange.incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
        named = {**self._headers, **{name.replace("_", "-"): of for name, of in headers.items()}}
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1", "method": method, "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        exchange.task = asyncio.create_task(self._app(scope, exchange.receive, exchange.send))
        return exchange

    def post(self, path: str, body: object, **headers: str) -> Exchange:
        """A request with a body of JSON, or of bytes, that has been sent and not yet answered."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.begin("POST", path, [sent], **headers)

    async def posted(self, path: str, body: object, **headers: str) -> Exchange:
        """Likewise, answered."""
        return await self.post(path, body, **headers).end()

    async def got(self, path: str, **headers: str) -> Exchange:
        return await self.begin("GET", path, [b""], **headers).end()

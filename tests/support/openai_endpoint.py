"""A small OpenAI-compatible endpoint on loopback, which answers as a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a request is answered.

    status: other than 200 is an error of OpenAI's form. texts: of the stream, an event each. lines:
    further lines of the stream before its end. ends: whether it has a [DONE]. breaks: whether the
    connection breaks off, instead of ending as HTTP says. usage, report: of the last event.
    """

    status: int = 200
    texts: Sequence[str] = ("one", " two", " three")
    lines: Sequence[str] = ()
    ends: bool = True
    breaks: bool = False
    usage: dict[str, Any] | None = None
    report: dict[str, Any] | None = None


@dataclass
class Endpoint:
    """A server that runs. asked: path and body of every POST, in the order in which they came."""

    url: str
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]


@contextmanager
def openai_endpoint(
    reply: Callable[[dict[str, Any]], Reply] = lambda body: Reply(),
) -> Iterator[Endpoint]:
    """Serves ``/v1``; ``reply`` decides on the answer to each body."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *parts: object) -> None: ...

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.json(200, {"object": "list", "data": [{"id": "fake"}]})
            elif self.path == "/v1/samkv/chunks":
                self.json(200, {})
            else:
                self.failed(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.removeprefix("/v1/")
            endpoint.asked.append((path, body))
            if path == "samkv/chunks":
                self.json(200, {"object": "list", "data": []})
            elif path == "completions":
                self.answer(reply(body))
            else:
                self.failed(404)

        def answer(self, found: Reply) -> None:
            if found.status != 200:
                self.failed(found.status)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            if found.breaks:  # of more bytes than come
                self.send_header("Content-Length", "100000")
            self.end_headers()
            for text in ("", *found.texts):
                self.event({"choices": [{"text": text}]})
            last = {"choices": [], "usage": found.usage, "samkv": found.report}
            self.event({name: value for name, value in last.items() if value is not None})
            for line in (*found.lines, *(["data: [DONE]"] if found.ends else [])):
                self.wfile.write(f"{line}\n\n".encode())

        def event(self, value: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())

        def failed(self, status: int) -> None:
            self.json(status, {"error": {"message": f"no {status}", "type": "test", "code": None}})

        def json(self, status: int, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer((HOST, 0), Handler)
    endpoint = Endpoint(url=f"http://{HOST}:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

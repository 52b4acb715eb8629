"""An OpenAI-compatible endpoint of embeddings, on a free port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MEANINGS = ({"ferry", "boat", "vessel"}, {"museum", "gallery"}, {"harbour", "port"}, {"works"})
"""Words that mean the same."""


def vector(text: str) -> list[float]:
    """Its meanings, of which each is one dimension; texts without one are all alike."""
    words = {word.strip(".,?!").removesuffix("s").lower() for word in text.split()}
    words |= {word.strip(".,?!").replace("ies", "y").lower() for word in text.split()}
    return [*(float(bool(words & meaning)) for meaning in MEANINGS), 0.1]


class EmbeddingServer:
    """What the endpoint was asked, and what it says.

    requests: bodies; keys: their ``authorization``. answers: status and body of a response, made of
    the texts; None for `vector` of each. headers: further ones of each response.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: dict[str, str] = {}
        self.answer: Callable[[Sequence[str]], tuple[int, object]] | None = None

    def reply(self, body: dict[str, Any], key: str | None) -> tuple[int, object]:
        self.requests.append(body)
        self.keys.append(key)
        if self.answer is not None:
            return self.answer(body["input"])
        rows = [{"index": at, "embedding": vector(one)} for at, one in enumerate(body["input"])]
        return 200, {"object": "list", "data": rows[::-1]}  # in any order

    @property
    def texts(self) -> list[str]:
        """All texts that were asked about."""
        return [text for body in self.requests for text in body["input"]]


@contextmanager
def embedding_server() -> Iterator[EmbeddingServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status: int = 404
            said: object = {"error": self.path}
            if self.path == "/v1/embeddings":
                status, said = served.reply(body, self.headers["authorization"])
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # of a client that has read enough
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = EmbeddingServer(f"http://127.0.0.1:{server.server_port}/v1")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()

"""Clients that ask a server questions about a collection, one after another."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from tests.support.processes import PATIENCE_S, wait_until

_log = logging.getLogger(__name__)

ATTEMPTS = 200
_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Served:
    """An answer. place: of the question. samkv: its report.

    phase: in which it was asked and answered; empty for one that was under way as it changed.
    """

    place: int
    phase: str
    text: str
    sources: tuple[str, ...]
    samkv: Mapping[str, Any]

    @property
    def misses(self) -> Counter[str]:
        return Counter(self.samkv["chunk_misses"])

    @property
    def n_as_text(self) -> int:
        """Chunks that were answered from their text, not from their KV."""
        had = sum(self.samkv[name] for name in ("reused", "prefix_chunks", "computed_now"))
        return int(self.samkv["found"] - had)


def from_caches(report: Mapping[str, Any]) -> int:
    """Chunks of a prompt that were taken from the store's caches, or from memory."""
    return int(report["reused"] + report["prefix_chunks"])


class CutOff(Exception):
    """The answer did not come, and may be asked for again."""


class Load:
    """Clients at work while it is entered; every other request is a stream.

    They ask again after a connection that ends, a stream without its end, and an error of a proxy,
    which is plain text. An error of the server itself is in ``failed``.
    """

    def __init__(
        self, address: str, questions: Sequence[str], *, n_clients: int, top_k: int
    ) -> None:
        self._address, self._questions, self._top_k = address, questions, top_k
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(n_clients)
        ]
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.phase = "before"
        self.served: list[Served] = []
        self.failed: list[str] = []
        self.retried: Counter[str] = Counter()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a client does not come back"

    def of(self, phase: str) -> list[Served]:
        with self._lock:
            return [one for one in self.served if one.phase == phase]

    def enter(
        self,
        phase: str,
        act: Callable[[], object],
        n_served: int,
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin a phase by doing something; wait for ``n_served`` answers, and until it holds."""
        self.phase = phase
        act()
        try:
            wait_until(
                lambda: bool(self.failed) or (len(self.of(phase)) >= n_served and holds()),
                f"{n_served} answers of phase {phase!r}",
            )
        finally:
            _log.info("%s", self.figures(phase))
        assert not self.failed, self.failed[:3]

    def figures(self, phase: str) -> str:
        served = self.of(phase)
        missed = sum((one.misses for one in served), Counter[str]())
        return (
            f"{phase}: {len(served)} served, {self.retried[phase]} asked again, "
            f"{sum(one.samkv['found'] for one in served)} chunks, misses {dict(missed)}, "
            f"{sum(one.n_as_text for one in served)} as text"
        )

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self._address, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stop.is_set():
                place, phase = draw.randrange(len(self._questions)), self.phase
                is_stream = draw.random() < 0.5
                try:
                    body = self._answer(client, place, is_stream=is_stream)
                except Exception as error:
                    with self._lock:
                        self.failed.append(f"{phase}: {type(error).__name__}: {error}")
                    return
                one = Served(
                    place=place,
                    phase=phase if phase == self.phase else "",
                    text=body["answer"],
                    sources=tuple(source["text"] for source in body["sources"]),
                    samkv=body["samkv"],
                )
                with self._lock:
                    self.served.append(one)

    def _answer(self, client: httpx.Client, place: int, *, is_stream: bool) -> dict[str, Any]:
        asked = {
            "question": self._questions[place], "top_k": self._top_k, "max_tokens": 8,
            "stream": is_stream,
        }  # fmt: skip
        for _ in range(ATTEMPTS):
            try:
                return body_of(client.post("/v1/samkv/ask", json=asked), is_stream=is_stream)
            except (CutOff, httpx.TransportError):
                with self._lock:
                    self.retried[self.phase] += 1
                self._stop.wait(_PAUSE_S)
        raise AssertionError(f"no answer after {ATTEMPTS} attempts")


def body_of(reply: httpx.Response, *, is_stream: bool) -> dict[str, Any]:
    """The answer, its sources and its report, as of a body; of a stream they are put together.

    Raises CutOff if it is not whole, AssertionError for an error of the server's own.
    """
    is_ours = "json" in reply.headers.get("content-type", "")
    if reply.status_code in (500, 503) and not is_ours:
        raise CutOff(reply.text)
    assert reply.status_code == 200, (reply.status_code, reply.text[:500])
    if not is_stream:
        body: dict[str, Any] = reply.json()
        return body
    parts = [part.removeprefix("data: ") for part in reply.text.split("\n\n") if part]
    if not parts or parts.pop() != "[DONE]":
        raise CutOff("a stream without an end")
    first, *pieces, last = [json.loads(part) for part in parts]
    assert "error" not in last, last
    return {**last, "sources": first["sources"], "answer": "".join(one["text"] for one in pieces)}

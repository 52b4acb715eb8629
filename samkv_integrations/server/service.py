"""The service behind every route: it begins an answer, and writes it as a body or as events."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from samkv_integrations.engine import Engine
from samkv_integrations.options import AnswerOptions
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.server.failures import NO_PATHS, Failure
from samkv_integrations.server.tenancy import Tenancy, Tenant
from samkv_integrations.serving.listeners import AnswerEnded
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.stream import Answer, AnswerStream, off_loop

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers that keep answers out of caches, and let nginx forward each event at once."""

MAX_PARTS = 30_000
"""Most strings, numbers, commas and opening brackets of a body; 100 digits count as one number. The
event loop parses and checks a body without pause. Each wrong value takes 10 µs and 1 kB."""

# It matches at every position, so that the time is linear.
_PART = re.compile(rb'[^",\[{\d]*+(?:"(?:[^"\\]++|\\.)*+"?|\d{1,100}+|[,\[{]|\Z)', re.DOTALL)

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server beside its model, its folder and its keys.

    model_name: the name that clients use. most_tokens: most tokens of an answer whose client names
    no number. timeout_s: most seconds of an answer, waiting included; None for no limit.
    logs_prompts: whether prompts are logged, at INFO. max_body_bytes: most bytes of a request.
    cors_origins: web pages of other origins that a browser lets use the server. is_lenient: whether
    fields that the server does not know or support are ignored where that gives no other answer.
    """

    model_name: str
    most_tokens: int = 1024
    timeout_s: float | None = None
    logs_prompts: bool = False
    max_body_bytes: int = 8_000_000
    cors_origins: Sequence[str] = ()
    is_lenient: bool = False


class Metrics:
    """Prometheus metrics of one server. No label holds a text, a key or a tenant's name."""

    def __init__(self, scheduler: Scheduler) -> None:
        own = self._registry = CollectorRegistry()
        ProcessCollector(registry=own)  # memory, file descriptors, CPU
        counter = partial(Counter, registry=own)
        seconds = partial(Histogram, registry=own, buckets=_SECONDS)
        self._requests = counter("samkv_requests", "Requests by path, status.", ("path", "status"))
        self._prompt = counter("samkv_prompt_tokens", "Tokens of prompts by source.", ("source",))
        self._generated = counter("samkv_generated_tokens", "Tokens of answers.")
        self._chunks = counter("samkv_chunks", "Chunks of prompts by outcome.", ("outcome",))
        self._read = counter("samkv_read_bytes", "Bytes read from chunk caches.")
        self._first = seconds("samkv_time_to_first_token_seconds", "From request to first token.")
        self._wait = seconds("samkv_wait_seconds", "The part of it until the model was free.")
        self._per_token = seconds(
            "samkv_time_per_output_token_seconds", "Of answers of two tokens and more."
        )
        for name, help_, value in (
            ("samkv_requests_running", "Answers that have begun.", lambda: scheduler.load.running),
            ("samkv_requests_waiting", "Answers that have not.", lambda: scheduler.load.waiting),
            ("samkv_kv_bytes", "KV that those may come to.", lambda: scheduler.load.kv_bytes),
        ):
            Gauge(name, help_, registry=own).set_function(value)

    def count_request(self, path: str, status: int) -> None:
        """Count a request that has ended. path: the route with the names of its parameters."""
        self._requests.labels(path, str(status)).inc()

    def count_answer(self, ended: AnswerEnded) -> None:
        """Count an answer that has ended, complete or not, if it had a first token."""
        if (report := ended.report) is None:
            return
        for source, n_tokens in (
            ("chunks", report.cached_tokens - report.prefix_tokens),
            ("prefix", report.prefix_tokens),
            ("computed", report.prompt_tokens - report.cached_tokens),
        ):
            self._prompt.labels(source).inc(max(0, n_tokens))
        self._generated.inc(report.completion_tokens)
        for outcome, n_chunks in (
            ("reused", report.reused), ("prefix", report.prefix_chunks),
            ("computed_now", report.computed_now), ("missed", sum(report.chunk_misses.values())),
        ):  # fmt: skip
            self._chunks.labels(outcome).inc(n_chunks)
        self._read.inc(report.bytes_read)
        self._first.observe(report.ttft_s)
        self._wait.observe(report.wait_s)
        if report.decode_tokens_per_s:
            self._per_token.observe(1 / report.decode_tokens_per_s)

    @property
    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class BoundedRoute(APIRoute):
    """A route that refuses a body of more than `MAX_PARTS` before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            try:
                body = await request.body()  # the request keeps the body
            except ClientDisconnect as error:
                raise Failure(400, "the client left before the body's end") from error
            if b"\0" in body:  # never in JSON in UTF-8, but in UTF-16
                raise Failure(
                    400, "the body holds a zero byte; send JSON in UTF-8", code="invalid_value"
                )
            parts = _PART.finditer(body)
            if next(islice(parts, MAX_PARTS, None), None) is not None:
                raise Failure(
                    400, f"the body has more than {MAX_PARTS} strings, numbers, commas and opening "
                    "brackets; send shorter lists and objects", code="invalid_value",
                )  # fmt: skip
            return await handle(request)

        return bounded


class Writer(Protocol):
    """Writes one answer in the form of a route."""

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""

    def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The JSON data of each server-sent event of a streamed answer."""


class Service:
    """Answers requests of all routes. since: start of the server, in seconds since the epoch."""

    def __init__(self, tenancy: Tenancy, settings: Settings) -> None:
        self.tenancy, self.settings = tenancy, settings
        self.metrics = Metrics(tenancy.scheduler)
        tenancy.listen(self.metrics.count_answer)
        self.since = int(time.time())

    def failure(self, error: Exception, paths: Mapping[str, str] = NO_PATHS) -> Failure:
        """The response to an exception, with the model's name for clients; see `Failure.of`."""
        names = self.tenancy.scheduler.model.name, self.settings.model_name
        return Failure.of(error, names, paths)

    def require_model(self, name: str) -> None:
        """Raises Failure if ``name`` is not the model's."""
        known = self.settings.model_name
        if name != known:
            raise Failure(
                404, f"there is no model {name[:80]!r} here; known: {known!r}",
                code="model_not_found", param="model",
            )  # fmt: skip

    async def engine(self, tenant: Tenant) -> Engine:
        """The engine of a tenant. Raises StoreError if its folder cannot be used."""
        return await off_loop(self.tenancy.engine, tenant, owner=tenant.owner)

    async def respond(
        self,
        request: Request,
        engine: Engine,
        prompt: Prompt,
        options: AnswerOptions,
        writer: Writer,
        *,
        most_tokens: int | None,
        is_streamed: bool,
        chunks: Sequence[str] | None = None,
    ) -> Response:
        """The response to a prompt. A stream begins with its first token.

        prompt, chunks, options, errors: see `Engine.stream`. most_tokens: None for the server's
        limit, or less if the context window is smaller.
        """
        owner: str = request.state.tenant.owner
        if self.settings.logs_prompts:
            _log.info("prompt: %r", prompt)

        async def begin() -> AnswerStream:
            most = most_tokens
            if most is None:
                window = engine.model.context_window
                count = partial(engine.count_tokens, prompt, most=window)
                n_tokens = await off_loop(count, owner=owner)
                most = max(1, min(self.settings.most_tokens, window - n_tokens))
            ends = [options.get("timeout"), self.settings.timeout_s]
            timeout = min((each for each in ends if each is not None), default=None)
            given = options | {"max_new_tokens": most, "timeout": timeout, "owner": owner}
            return await engine.astream(prompt, chunks, **given)

        async def whole() -> Answer:
            async with await begin() as stream:
                return Answer.of("".join([piece async for piece in stream]), stream)

        if not is_streamed:
            return JSONResponse(writer.body(await unless_gone(request.receive, whole())))
        stream = await unless_gone(request.receive, begin())
        return _EventStream(self._events(request, stream, writer), headers=_HEADERS)

    async def _events(
        self, request: Request, stream: AnswerStream, writer: Writer
    ) -> AsyncIterator[str]:
        """The events of an answer, of which the last may be an error; then the answer is closed."""
        try:
            async with stream:
                async for data in writer.events(stream):
                    yield _event(data)
            yield "data: [DONE]\n\n"
        except Exception as error:
            request.state.failure = failure = self.failure(error)
            yield _event(failure.body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Made]) -> _Made:
    """The result of ``work``. Cancels it and raises Failure if the client disconnects."""
    working = asyncio.ensure_future(work)

    async def cancel_when_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        working.cancel()

    watching = asyncio.ensure_future(cancel_when_gone())
    try:
        return await working
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled():
            # for log and metrics; 499 is nginx's status for a lost client
            raise Failure(499, "the client is gone", code="client_gone") from None
        raise  # the server ends
    finally:
        watching.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events, which end when the client disconnects."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            try:
                await unless_gone(receive, self.stream_response(send))
            except Failure as failure:
                scope["state"]["failure"] = failure


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"

"""The ASGI application: the guard in front of all routes, and the page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samkv_integrations import release
from samkv_integrations.errors import SamkvError
from samkv_integrations.server import ask, chunks, completions
from samkv_integrations.server.bodies import ErrorBody
from samkv_integrations.server.failures import Failure
from samkv_integrations.server.leniency import HEADER
from samkv_integrations.server.service import Metrics, Service, Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.tracing import below_caller

PAGE = Path(__file__).with_name("page.html")

OPEN_PATHS = ("/health", "/")
"""Paths that need no key, because they show no data of a tenant."""

STUCK_S = 600
"""Seconds of one pass or step of the model after which the server counts as stuck."""

MOST_DISCARDED, DISCARD_S = 2**28, 10.0
"""Bytes of a refused body, and seconds, after which its connection is closed in any case."""

_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_log = logging.getLogger(__name__)

_DESCRIPTION = """OpenAI's API for a local model. Texts of cached chunks are found in prompts, and
their KV entries are reused."""


def create_app(tenancy: Tenancy, keys: ApiKeys, settings: Settings) -> FastAPI:
    """The application; ``/openapi.json`` describes its routes."""
    service = Service(tenancy, settings)
    app = FastAPI(
        title="samkv", version=release.version(), description=_DESCRIPTION,
        docs_url=None, redoc_url=None,  # these pages load scripts from a CDN
        redirect_slashes=False,  # so that a wrong path is an error in OpenAI's form
        telemetry={"logs": False},  # an error's message may hold a prompt
    )  # fmt: skip
    app.add_middleware(
        Guard, keys=keys, max_body_bytes=settings.max_body_bytes, metrics=service.metrics
    )
    if settings.cors_origins:  # in front of the guard: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["x-request-id", HEADER],
        )  # fmt: skip

    @app.exception_handler(HTTPException)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(SamkvError)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            failure = Failure.of_body(error.errors())
        elif isinstance(error, HTTPException) and not isinstance(error, Failure):
            failure = _of_framework(request, error)
        else:
            failure = service.failure(error)
        request.state.failure = failure
        return failure.response

    @app.get("/health", tags=["server"])
    async def health() -> dict[str, str]:
        """Whether the server answers and the model makes progress."""
        if tenancy.scheduler.pass_s > STUCK_S:
            raise Failure(
                503, f"a pass of the model has taken more than {STUCK_S} s; restart the server",
                code="stuck",
            )  # fmt: skip
        return {"status": "ok"}

    html = PAGE.read_text(encoding="utf-8")
    headers = page_headers(html)

    @app.get("/", tags=["server"], response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """A page that asks questions."""
        return HTMLResponse(html, headers=headers)

    # The guard checks keys; this dependency only documents them.
    bearer = Depends(HTTPBearer(auto_error=False))
    errors: dict[int | str, dict[str, Any]] = {
        "default": {"model": ErrorBody, "description": "An error; docs/server.md lists them."}
    }
    guarded = APIRouter(responses=errors, dependencies=[bearer])
    for part in (completions, chunks, ask):
        guarded.include_router(part.router(service))

    @guarded.get("/metrics", tags=["server"], response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text, media_type=CONTENT_TYPE_LATEST)

    described = {
        "id": settings.model_name, "object": "model", "created": service.since,
        "owned_by": "samkv", "max_model_len": tenancy.scheduler.model.context_window,
    }  # fmt: skip

    @guarded.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The models; a server has one."""
        return {"object": "list", "data": [described]}

    @guarded.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        service.require_model(model)
        return described

    app.include_router(guarded)
    return app


def _of_framework(request: Request, error: HTTPException) -> Failure:
    if error.status_code == 400:  # FastAPI's status for a body that Python cannot decode
        return Failure(
            400, "the body cannot be read: it must be JSON in UTF-8, with numbers of at most "
            "4,300 digits, and without deeply nested lists and objects",
        )  # fmt: skip
    path = request.url.path
    what, known = f"{request.method} {path[:80]}", request.app.openapi()["paths"].keys()
    trimmed = path.rstrip("/")
    meant = next((each for each in (trimmed, f"/v1{trimmed}") if each in known - {path}), None)
    hint = f"send it to {meant}" if meant else "/openapi.json lists all paths"
    message = f"{what}: {error.detail}; {hint}"
    if error.status_code == 405:
        return Failure(405, message, code="method_not_allowed")
    return Failure(error.status_code, message, code="not_found")


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, as far as `MOST_DISCARDED` and `DISCARD_S` allow."""
    n_bytes, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while more and n_bytes < MOST_DISCARDED:
                message = await receive()
                n_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)


def page_headers(html: str) -> dict[str, str]:
    """Headers that allow the page its own script and requests to this server only."""

    def hash_of(tag: str) -> str:
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        return f"'sha256-{digest}'"

    policy = (
        f"default-src 'none'; script-src {hash_of('script')}; style-src {hash_of('style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }


class Guard:
    """ASGI middleware that checks keys, hosts and sizes, and sets ``request.state.tenant``.

    Without keys it accepts loopback host names only, which prevents DNS rebinding: a web page whose
    name resolves to this machine.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int, metrics: Metrics) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.perf_counter(), Headers(scope=scope)
        state = scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status, n_bytes, is_read = 499, 0, False
        # a proxy in front may read such a request as two (RFC 9112, 6.1)
        has_two_lengths = "content-length" in headers and "transfer-encoding" in headers
        ends = has_two_lengths or "close" in headers.get("connection", "").lower()

        async def bounded() -> Message:
            nonlocal n_bytes, is_read
            message = await receive()
            n_bytes += len(message.get("body", b""))
            is_read = not message.get("more_body", False)
            self._require_size(n_bytes)
            return message

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                if has_two_lengths:
                    answered["connection"] = "close"
            elif ends and not (is_read or message.get("more_body", False)):
                # closing with unread bytes would reset the connection, and the answer would be lost
                await send({**message, "more_body": True})
                if "expect" not in headers:  # else the client waits before it sends the body
                    await _discard(receive)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            state["tenant"] = self._tenant_of(scope["path"], headers)
            if (length := headers.get("content-length", "")).isdecimal():
                self._require_size(int(length))
            with below_caller(headers):
                await self._app(scope, bounded, reply)
        except Exception as error:
            state["failure"] = failure = Failure.of(error)
            if status == 499:
                await failure.response(scope, receive, reply)
        finally:
            # the route: a client can make up any path
            path = str(getattr(scope.get("route"), "path", "other"))
            if failed := state.get("failure"):
                status = failed.status
                if failed.cause is not None:
                    _log.error("request %s: %s", request_id, failed.cause)
            self._metrics.count_request(path, status)
            _log.info(
                "%s %s %d %.3f s request=%s", scope["method"], path, status,
                time.perf_counter() - began, request_id,
            )  # fmt: skip

    def _tenant_of(self, path: str, headers: Mapping[str, str]) -> Tenant | None:
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if not self._keys and host not in _OWN_NAMES:
            raise Failure(
                403, "the Host header names another machine; it must be localhost or 127.0.0.1; "
                "ask there, or start the server with API keys", code="wrong_host",
            )  # fmt: skip
        tenant = self._keys.tenant_of(headers.get("authorization"))
        if tenant is None and path not in OPEN_PATHS:
            raise Failure(
                401, "no API key, or a wrong one; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )  # fmt: skip
        return tenant

    def _require_size(self, n_bytes: int) -> None:
        if n_bytes > self._max_body_bytes:
            raise Failure(
                413, f"the body has more than {self._max_body_bytes} bytes; send less, or start "
                "the server with a larger --max-body", code="body_too_large",
            )  # fmt: skip


class OneRequestId:
    """ASGI middleware that leaves the header x-request-id out, as Ray's proxies add it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_others(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [each for each in message["headers"] if each[0] != b"x-request-id"]
                message = {**message, "headers": named}
            await send(message)

        await self._app(scope, receive, send_others)

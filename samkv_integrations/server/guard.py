"""What stands before every route: whose a request is, how large it is, and what is logged of it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samkv_integrations.engine.tracing import below_caller
from samkv_integrations.server.failures import Failure, gone
from samkv_integrations.server.keys import ApiKeys
from samkv_integrations.server.metrics import Metrics

OPEN_PATHS = ("/health", "/")
"""What is answered without a key: nothing of anybody."""

BODY_S = 30.0
"""Seconds that a body may take to arrive."""

_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a server takes. max_body_bytes: of a request's body."""

    keys: ApiKeys
    max_body_bytes: int


class Guard:
    """ASGI middleware. What it lets pass finds its tenant in ``request.state.tenant``.

    Without keys, only requests to a loopback name pass: another name is that of a page in a browser
    whose name was pointed here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, rules: Rules, metrics: Metrics) -> None:
        self._app, self._rules, self._metrics = app, rules, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers, reply = time.perf_counter(), Headers(scope=scope), _Reply(send)
        reply.request_id = _request_id(headers.get("x-request-id"))
        try:
            self._admit(scope, headers)
            body = await self._body(headers, receive)
            with below_caller(headers):
                await self._app(scope, _Replayed(body, receive), reply)
        except Failure as failure:
            await reply.fail(failure, scope, receive)
        except asyncio.CancelledError:  # by the server, which ends
            await reply.fail(_ending(), scope, receive)
            raise
        except Exception as error:
            # not the message, which may hold a prompt
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.error("request %s: %s\n%s", reply.request_id, type(error).__name__, where)
            await reply.fail(_unexpected(), scope, receive)
        finally:
            path, status = _route(scope), reply.status
            if failed := scope.get("state", {}).get("failure"):
                status = failed.status
                if failed.cause is not None:
                    _log.error("request %s: %s", reply.request_id, failed.cause)
            self._metrics.count_request(path, status)
            _log.info(
                "%s %s %d %.3f s request=%s", scope["method"], path, status,
                time.perf_counter() - began, reply.request_id,
            )  # fmt: skip

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> None:
        if not self._rules.keys and _name_of(headers.get("host", "")) not in _OWN_NAMES:
            raise Failure(
                status=403, code="wrong_host",
                message="the Host header names another machine; ask for localhost or 127.0.0.1, or "
                "start the server with API keys",
            )  # fmt: skip
        tenant = self._rules.keys.tenant_of(headers.get("authorization"))
        if tenant is None and scope["path"] not in OPEN_PATHS:
            raise Failure(
                status=401, code="invalid_api_key",
                message="no API key, or a wrong one; send the header 'Authorization: Bearer KEY'",
            )  # fmt: skip
        scope.setdefault("state", {})["tenant"] = tenant

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        most, parts, n_bytes = self._rules.max_body_bytes, [], 0
        if (length := headers.get("content-length", "0")).isdecimal() and int(length) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise gone()
                    parts.append(message.get("body", b""))
                    n_bytes += len(parts[-1])
                    if n_bytes > most:
                        raise _too_large(most)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError as error:
            raise Failure(
                status=408, message=f"the body did not arrive within {BODY_S:.0f} s; send it again"
            ) from error


def _unexpected() -> Failure:
    return Failure(
        status=500, type="server_error", code="internal_error",
        message="the server failed; its log says where, under the x-request-id of this response",
    )  # fmt: skip


def _ending() -> Failure:
    return Failure(
        status=503, type="server_error", code="shutting_down",
        message="the server ends, and the answer was not complete; ask again later",
    )  # fmt: skip


def _too_large(most: int) -> Failure:
    return Failure(
        status=413, code="body_too_large",
        message=f"a body of more than {most} bytes; send less, or start the server with more as "
        "--max-body",
    )  # fmt: skip


class _Replayed:
    """A body that was read already, and after it that the client goes away, however often asked."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._next: Message | None = {
            "type": "http.request", "body": body, "more_body": False,
        }  # fmt: skip
        self._receive = receive

    async def __call__(self) -> Message:
        message = self._next or await self._receive()
        self._next = message if message["type"] == "http.disconnect" else None
        return message


class _Reply:
    """Passes a response on, with the request's id. status: of it, 499 before there is one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id = ""
        self.status = 499
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun, self.status = True, message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)

    async def fail(self, failure: Failure, scope: Scope, receive: Receive) -> None:
        """Answer with a failure; one in the midst of a stream is its last event."""
        if not self._has_begun:
            response = failure.response
            if failure.status in (408, 413):  # what is left of the body is not read
                response.headers["connection"] = "close"
            await response(scope, receive, self)
            return
        self.status = failure.status
        if failure.status != 499:
            event = f"data: {json.dumps(failure.body)}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _name_of(host: str) -> str:
    """A host without its port."""
    return re.sub(r":\d*$", "", host).lower()


def _request_id(given: str | None) -> str:
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Mapping[str, Any]) -> str:
    """The route's path, of which there are few; not what a client has made up."""
    route = scope.get("route")
    return str(getattr(route, "path", "other"))

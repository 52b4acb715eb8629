"""A server at work, from the first connection to the last answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from samkv_integrations.server.app import create_app
from samkv_integrations.server.guard import Rules
from samkv_integrations.server.keys import ApiKeys
from samkv_integrations.server.metrics import Metrics
from samkv_integrations.server.protocol import Connection
from samkv_integrations.server.service import Service
from samkv_integrations.server.tenancy import Tenancy

MAX_HEADER_BYTES = 2**16
"""Of one request; more is answered with a 400."""

LAST_WORDS_S = 5.0
"""Seconds that answers have which are cut off, to say so and to let go."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server can be told beside its model, its folder and its keys; see `Service`.

    max_body_bytes: of a request. grace_s: seconds that running answers have when the server ends;
    None for as long as they take.
    """

    model_name: str
    most_tokens: int = 1024
    timeout_s: float | None = None
    logs_prompts: bool = False
    max_body_bytes: int = 8_000_000
    grace_s: int | None = 30


def run(
    tenancy: Tenancy,
    keys: ApiKeys,
    listening: socket.socket,
    settings: Settings,
    ready: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or SIGINT; running answers are let end then.

    ready: called with the server's address, once it answers.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    address = address_of(listening)
    server = server_of(tenancy, keys, settings, lambda: ready(address))
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def address_of(listening: socket.socket) -> str:
    """The URL of a socket that listens, without a path."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(
    tenancy: Tenancy, keys: ApiKeys, settings: Settings, ready: Callable[[], None]
) -> uvicorn.Server:
    """A server whose `run` has to be called, with sockets, and ends once its should_exit is set.

    In a thread that is not the main one it leaves signals alone. ready: called once it answers.
    """
    app = application(tenancy, keys, settings)
    config = uvicorn.Config(
        _until_cut_off(app),
        http=Connection,  # h11, the one that bounds headers
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=settings.grace_s,
    )
    return _Server(config, ready)


def application(tenancy: Tenancy, keys: ApiKeys, settings: Settings) -> FastAPI:
    """What answers, without the server that holds its connections."""
    service = Service(
        tenancy=tenancy,
        metrics=Metrics(tenancy.scheduler),
        model_name=settings.model_name,
        most_tokens=settings.most_tokens,
        timeout_s=settings.timeout_s,
        logs_prompts=settings.logs_prompts,
    )
    return create_app(service, Rules(keys=keys, max_body_bytes=settings.max_body_bytes))


def _until_cut_off(app: ASGIApp) -> ASGIApp:
    """The application, for a server that takes the end of a cancelled request for an error."""

    async def cut_off(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return cut_off


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # who is cut off is told so: the process may end with this call
        if tasks := set(self.server_state.tasks):
            for task in tasks:
                if not task.cancelling():  # a second Ctrl-C
                    task.cancel()
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)

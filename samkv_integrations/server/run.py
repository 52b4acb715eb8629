"""The process of a server: its address, its event loop, and its memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from samkv_integrations.errors import InvalidOption
from samkv_integrations.server.tenancy import ApiKeys

MAX_HEADER_BYTES = 2**16
"""Most bytes of a request's headers; the server answers more with a 400."""

MAX_CHUNKS = 4096
"""Most chunks of a body in HTTP's chunked encoding. Each chunk takes the event loop 25 µs, even a
chunk of one byte."""

SWITCH_S = 5e-4
"""Seconds for which a thread keeps the GIL while another one wants it."""

RETURN_S = 30.0
"""Seconds between two calls of malloc_trim, which take .1 s on a busy server."""


def listen_on(host: str, port: int, keys: ApiKeys) -> socket.socket:
    """A listening socket. port: 0 for a free one.

    Raises InvalidOption if the port is taken, if the address is not this machine's, or if other
    machines could reach a server without keys.
    """
    is_loopback = host == "localhost"
    with suppress(ValueError):
        is_loopback = is_loopback or ipaddress.ip_address(host).is_loopback
    if not (keys or is_loopback):
        raise InvalidOption(
            f"--host {host} without API keys: everybody who reaches this machine could ask; give "
            "--api-keys FILE or the variable SAMKV_API_KEYS, or leave --host out"
        )
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # without the address
        taken = error.errno == errno.EADDRINUSE
        remedy = "give another --port, or 0 for a free one" if taken else "give --host and --port"
        raise InvalidOption(f"cannot listen on {host} port {port}: {why}; {remedy}") from error
    except OverflowError as error:
        raise InvalidOption(f"--port {port}; it must be from 0 to 65535") from error


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket, without a path."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Connection(h11.Connection):
    """A connection that refuses bodies of more than `MAX_CHUNKS`."""

    _n_chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._n_chunks += 1
            if self._n_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"the body has more than {MAX_CHUNKS} chunks")
        return event


class _Protocol(H11Protocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, MAX_HEADER_BYTES)


class Server(uvicorn.Server):
    """A uvicorn server for listening sockets.

    grace_s: most seconds for running answers at shutdown; None for no limit. ready: called once the
    server answers.
    """

    def __init__(self, app: FastAPI, grace_s: int | None, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, timeout_graceful_shutdown=grace_s,
            )
        )  # fmt: skip
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


@cache
def spare_memory() -> None:
    """Return freed memory to the system regularly; works only with glibc."""

    def give_back() -> None:
        while True:
            time.sleep(RETURN_S)
            # by itself, glibc returns no memory below pages in use
            with suppress(AttributeError, OSError, TypeError):
                ctypes.CDLL(None).malloc_trim(0)

    threading.Thread(target=give_back, name="samkv-memory", daemon=True).start()


def shorten_pauses() -> None:
    """Shorten the waits of the model's thread, which needs the GIL after each of its operations.

    Otherwise a thread that reads a request keeps the GIL for 5 ms each time, and garbage collection
    of all present objects stops all threads for a third of a second.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


def run(app: FastAPI, listening: socket.socket, grace_s: int, ready: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT, then let running answers finish.

    grace_s: most seconds for running answers. ready: called with the server's address once it
    answers.
    """
    spare_memory()
    shorten_pauses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    address = address_of(listening)
    server = Server(app, grace_s, lambda: ready(address))
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])

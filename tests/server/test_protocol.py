"""Connections whose clients take nothing of what was sent: they are cut, and no others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from samkv_integrations.server import protocol as module
from samkv_integrations.server.protocol import Connection
from tests.support.asgi import PATIENCE_S

BODY = b"x" * 400_000
ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def large(_: Scope, __: Receive, send: Send) -> None:
    """An application whose answers do not fit into the buffers below."""
    head = [(b"content-length", b"%d" % len(BODY))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": BODY})


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A port whose connections hold little for those who do not read."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield made


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> ServerState:
    monkeypatch.setattr(module, "UNREAD_S", 0.2)
    return ServerState()


async def serve(listening: socket.socket, state: ServerState) -> asyncio.Server:
    config = uvicorn.Config(large, http=Connection, lifespan="off", log_config=None)
    config.load()
    return await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}), sock=listening
    )


async def asked(listening: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listening.getsockname())
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    writer.write(ASKED)
    return reader, writer


async def until_none_is_left(state: ServerState) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while state.connections or not state.total_requests:
            await asyncio.sleep(0.01)


async def test_a_client_that_reads_nothing_is_cut(
    listening: socket.socket, state: ServerState
) -> None:
    """It stayed for as long as the client liked, though its answer was over."""
    async with await serve(listening, state):
        reader, writer = await asked(listening)
        await until_none_is_left(state)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(len(BODY))
        writer.close()


def test_a_client_that_reads_slowly_keeps_its_connection(state: ServerState) -> None:
    """As long as something was taken since the last look."""
    config = uvicorn.Config(large, http=Connection, lifespan="off", log_config=None)
    config.load()
    loop, transport = Mock(), Mock()
    connection = Connection(config, state, {}, loop)
    connection.connection_made(transport)
    transport.get_write_buffer_size.return_value = 300
    connection.pause_writing()
    for left in (200, 100, 99):
        transport.get_write_buffer_size.return_value = left
        _, look, *arguments = loop.call_later.call_args.args
        look(*arguments)
    transport.abort.assert_not_called()
    assert loop.call_later.call_count == 4
    connection.resume_writing()
    loop.call_later.return_value.cancel.assert_called_once_with()

"""Bodies as large as the server takes, made to cost much: refused while others are served."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from samkv_integrations.server.run import MAX_CHUNKS
from samkv_integrations.server.service import MAX_PARTS
from tests.server.conftest import App
from tests.support.live_server import answering

MAX_BODY = 8_000_000
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK, CHUNKS = "/v1/samkv/ask", "/v1/samkv/chunks"
TURN = '{"role": "user", "content": "Q?"}'
HEAD = '{"model": "tiny", "max_tokens": 1, '
ASKED = f'{HEAD}"messages": [{TURN}], '
WORDS = "word and " * 850_000
MOST_BYTES = 200e6  # it was up to 5 GB, and 100 s of the event loop for what took them


def filled(begin: str, item: str, end: str = "]}", n_bytes: int = MAX_BODY - 1000) -> str:
    """A body with an item as often as it fits."""
    return begin + ",".join([item] * (n_bytes // (len(item) + 1))) + end


def keyed(n_keys: int) -> str:
    return ",".join(f'"{n:x}":0' for n in range(n_keys))


BODIES: dict[str, tuple[str, Callable[[], str]]] = {
    "zeros for messages": (CHAT, lambda: filled(f'{HEAD}"messages": [', "0")),
    "empty messages": (CHAT, lambda: filled(f'{HEAD}"messages": [', "{}")),
    "valid messages": (CHAT, lambda: filled(f'{HEAD}"messages": [', TURN)),
    "zeros for input": (RESPONSES, lambda: filled(f'{HEAD}"input": [', "0")),
    "modalities": (CHAT, lambda: filled(f'{ASKED}"modalities": [', "0")),
    "metadata": (CHAT, lambda: f'{ASKED}"metadata": {{{keyed(800_000)}}}}}'),
    "unknown fields": (CHAT, lambda: f"{ASKED}{keyed(800_000)}}}"),
    "texts": (CHUNKS, lambda: filled('{"texts": [', "0")),
    "long numbers": (TEXT, lambda: filled(f'{HEAD}"prompt": [', "9" * 4300)),
    "a long string": (TEXT, lambda: f'{HEAD}"prompt": "{WORDS}"}}'),
    "a string of escapes": (TEXT, lambda: HEAD + '"prompt": "' + r"\"" * 3_900_000 + '"}'),
    "an open string": (TEXT, lambda: '"' + "a" * 7_900_000),
    "a question": (ASK, lambda: f'{{"question": "{WORDS}"}}'),
    "a method": (TEXT, lambda: f'{HEAD}"prompt": "Q?", "samkv": {{"method": "{WORDS}"}}}}'),
    # as many as are read
    "fewer messages": (CHAT, lambda: filled(f'{HEAD}"messages": [', "null", n_bytes=145_000)),
    "fewer modalities": (CHAT, lambda: filled(f'{ASKED}"modalities": [', "null", n_bytes=145_000)),
    "fewer wrong messages": (
        CHAT, lambda: filled(f'{HEAD}"messages": [', '{"a":[],"b":[]}', n_bytes=50_000),
    ),
    "fewer unknown fields": (CHAT, lambda: f"{ASKED}{keyed(9_900)}}}"),
}  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux has it")
@pytest.mark.parametrize("name", BODIES)
async def test_costly_bodies_are_refused_in_little_memory(
    name: str, make_app: Callable[..., App]
) -> None:
    path, made = BODIES[name]
    sent, app = made().encode(), make_app(max_body_bytes=MAX_BODY)
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    reply = await app.client.posted(path, sent)
    grown = kilobytes("VmHWM") - before
    assert reply.status in (400, 404), reply.text
    assert len(reply.text) < 1000
    assert grown * 1000 < MOST_BYTES


def kilobytes(name: str) -> int:
    (found,) = re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found)


async def test_parts_in_utf_16_are_not_read(app: App) -> None:
    """One of its characters would look like a quotation mark."""
    reply = await app.client.posted(TEXT, ('{"∀":[' + "0," * 100 + "0]}").encode("utf-16-le"))
    assert (reply.status, reply.error["code"]) == (400, "invalid_value")
    assert "JSON in UTF-8" in reply.error["message"]


@pytest.mark.parametrize("n_parts", [MAX_PARTS, MAX_PARTS + 1])
async def test_how_many_parts_a_body_may_have(n_parts: int, app: App) -> None:
    """Commas and brackets within a string are text."""
    body = f'{{"model": "tiny", "max_tokens": 1, "prompt": "{",[{" * 3000}", "a": ['
    parts_so_far = 14
    body += "[" * (n_parts - parts_so_far) + "}"
    reply = await app.client.posted(TEXT, body.encode())
    assert reply.status == 400
    assert ("more than 30000" in reply.error["message"]) == (n_parts > MAX_PARTS)


# -- over a socket ------------------------------------------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SMALL = b'{"model": "tiny", "prompt": "Q:", "max_tokens": 1}'


def sent_to(address: str, *parts: bytes) -> bytes:
    """What the server says until it closes the connection, or for a second."""
    host, port = address.removeprefix("http://").split(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=30) as connected:
        for part in parts:
            connected.sendall(part)
        while b"}}" not in said and (more := connected.recv(65536)):
            said += more
        return said


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_gets_its_answer(is_chunked: bool, app: App) -> None:
    with answering(app.asgi, app.keys) as address:
        host, port = address.removeprefix("http://").split(":")
        client = http.client.HTTPConnection(host, int(port), timeout=30)
        body, kind = b" " * 20_000_000, {"content-type": "application/json"}
        for _ in range(2):  # the connection goes on
            client.request("POST", TEXT, iter([body]) if is_chunked else body, kind)
            reply = client.getresponse()
            assert reply.status == 413
            assert b"body_too_large" in reply.read()
        client.request("GET", "/health")
        assert client.getresponse().status == 200
        client.close()


@pytest.mark.parametrize(("name", "status"), [("localhost", 413), ("evil.example", 403)])
def test_an_answer_before_the_body_was_read_precedes_the_end_of_the_connection(
    name: str, status: int, app: App
) -> None:
    """It was lost: a connection that is closed with bytes unread is reset."""
    with answering(app.asgi, app.keys) as address:
        host, port = address.removeprefix("http://").split(":")
        client = http.client.HTTPConnection(host, int(port), timeout=30)
        headers = {"connection": "close", "host": name}
        client.request("POST", TEXT, b" " * 20_000_000, headers)
        assert client.getresponse().status == status
        client.close()


def test_a_request_of_two_lengths_ends_its_connection(app: App) -> None:
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMALL), SMALL)
    lengths = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    with answering(app.asgi, app.keys) as address:
        said = sent_to(address, POST + lengths + chunk)
        assert said.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in said
        said = sent_to(address, POST + b"transfer-encoding: chunked\r\n\r\n" + chunk)
        assert said.startswith(b"HTTP/1.1 200")
        assert b"connection: close" not in said


def test_a_body_of_chunks_of_a_byte_is_refused(app: App) -> None:
    one = b"1\r\n \r\n"
    with answering(app.asgi, app.keys) as address:
        head = POST + b"transfer-encoding: chunked\r\n\r\n"
        assert sent_to(address, head, one * (MAX_CHUNKS + 1)).startswith(b"HTTP/1.1 400")

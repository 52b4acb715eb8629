"""Where a server may listen."""

from __future__ import annotations

import socket

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.server.run import listen_on
from samkv_integrations.server.tenancy import ApiKeys, Tenant

NO_KEYS = ApiKeys("", Tenant())
SOME = ApiKeys("sk-of-the-red-team red", Tenant())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_loopback_needs_no_keys(host: str) -> None:
    with listen_on(host, 0, NO_KEYS) as listening:
        with socket.create_connection(listening.getsockname()[:2], timeout=10) as connected:
            assert connected.getpeername()[0] == listening.getsockname()[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.0.2.1", "example.com", "::"])
def test_another_address_does(host: str) -> None:
    with pytest.raises(InvalidOption, match="without API keys"):
        listen_on(host, 0, NO_KEYS)


def test_with_keys_it_may_be_any() -> None:
    with listen_on("0.0.0.0", 0, SOME) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"


def test_a_port_that_is_taken() -> None:
    with listen_on("127.0.0.1", 0, NO_KEYS) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(InvalidOption, match=f"port {port}: .*in use; give another --port"):
            listen_on("127.0.0.1", port, NO_KEYS)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(InvalidOption, match=f"--port {port}; it must be from 0 to 65535"):
        listen_on("127.0.0.1", port, NO_KEYS)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(InvalidOption, match="cannot listen on 192.0.2.1"):
        listen_on("192.0.2.1", 0, SOME)

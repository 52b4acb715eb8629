"""A real Chroma server for the tests that need one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HOST = "127.0.0.1"
START_S = 60.0


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def chroma_server(folder: Path) -> Iterator[int]:
    """Serves the database in ``folder``; gives the port when the server answers."""
    port, command = free_port(), str(Path(sys.executable).parent / "chroma")
    where = ("--path", str(folder), "--host", HOST, "--port", str(port))
    # to a file: a pipe that nobody reads would fill up and stop the server
    with (folder.parent / "server.log").open("w") as log:
        server = subprocess.Popen([command, "run", *where], stdout=log, stderr=log)
        try:
            _wait_for(server, port)
            yield port
        finally:
            server.kill()
            server.wait()


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            assert server.poll() is None, "the server ended; see server.log"
            try:
                client.get(f"http://{HOST}:{port}/api/v2/heartbeat").raise_for_status()
                return
            except httpx.HTTPError:
                continue
    raise AssertionError(f"no answer within {START_S} s")

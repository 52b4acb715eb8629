"""The server that ``samkv bench serve`` starts for itself, and stops whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

from samkv_integrations.cli.serve import KEYS_VARIABLE
from samkv_integrations.errors import InvalidOption

STOP_S = 10.0
"""Seconds after which a server that does not stop is killed."""

_READY = re.compile(r"serving .* on (https?://\S+)")
_COMMAND = (sys.executable, "-c", "from samkv_integrations.cli.app import main; main()")
_LAST_LINES = 5


@contextmanager
def serving(options: Sequence[str], command: Sequence[str] = _COMMAND) -> Iterator[str]:
    """A server in a process of its own, on a free port; gives its URL once it is ready.

    options: of ``samkv serve``. command: what is run in place of ``samkv``.

    Raises InvalidOption with the server's last words if it ends before it is ready.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop(KEYS_VARIABLE, None)  # of another server: nobody has a key of this one
    with _ends_on_sigterm():
        server = subprocess.Popen(
            [*command, "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", env=environment,
        )  # fmt: skip
        assert server.stderr is not None
        # a pipe that nobody reads would fill up and stop the server
        reader = threading.Thread(target=deque, args=(server.stderr, 0), daemon=True)
        with server.stderr:
            try:
                url = _ready_url(server, server.stderr)
                reader.start()
                yield url
            finally:
                _stop(server)
                if reader.is_alive():
                    reader.join()


def _ready_url(server: subprocess.Popen[str], lines: IO[str]) -> str:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    for line in lines:
        if found := _READY.search(line):
            return found[1]
        last.append(line.strip())
    said = " ".join(line for line in last if line) or "it said nothing"
    raise InvalidOption(
        f"the server ended before it was ready (exit code {server.wait()}): {said}; mend that, or "
        "name a running server with --url"
    )


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process as an exception does, so that what it started is stopped."""
    if threading.current_thread() is not threading.main_thread():  # where no signal comes
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

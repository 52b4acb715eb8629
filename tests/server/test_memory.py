"""A server gives back what it has freed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.server import run
from samkv_integrations.server.app import create_app
from samkv_integrations.server.run import Server, listen_on, return_memory
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from tests.support.models import tiny_model

OF_GLIBC = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library"
)

COUNT_ARENAS = """
import ctypes, os, sys, threading
from samkv_integrations.server.run import share_arenas
share_arenas()
met = threading.Barrier(13)
def work():
    held = bytearray(20_000)
    met.wait()
    met.wait()
for _ in range(12):
    threading.Thread(target=work).start()
met.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
met.wait()
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@OF_GLIBC
def test_threads_share_two_arenas() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT_ARENAS], stdout=subprocess.PIPE, check=True)
    assert 1 <= done.stdout.count(b"<heap nr=") <= 2


@OF_GLIBC
def test_what_was_freed_below_something_in_use_is_given_back() -> None:
    blocks = [bytearray(b"x" * 60_000) for _ in range(2000)]
    del blocks[:-1]
    before = resident_bytes()
    return_memory()
    assert before - resident_bytes() > 60e6


def test_a_server_does_so_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = threading.Event()
    monkeypatch.setattr(run, "return_memory", is_done.set)
    monkeypatch.setattr(run, "TICKS", 1)
    keys = ApiKeys("", Tenant())
    app = create_app(
        Tenancy(Scheduler(tiny_model("llama")), tmp_path), keys, Settings(model_name="tiny")
    )

    def end_soon() -> None:
        is_done.clear()  # of the start
        threading.Thread(target=end_when_done).start()

    def end_when_done() -> None:
        is_done.wait(10)
        server.should_exit = True

    server = Server(app, 0, end_soon)
    with listen_on("127.0.0.1", 0, keys) as listening:
        server.run(sockets=[listening])
    assert is_done.is_set()

"""A server gives back what it has freed."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from samkv_integrations.server import run
from samkv_integrations.server.run import return_memory

OF_GLIBC = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library"
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@OF_GLIBC
def test_what_was_freed_below_something_in_use_is_given_back() -> None:
    blocks = [bytearray(b"x" * 60_000) for _ in range(2000)]
    del blocks[:-1]
    before = resident_bytes()
    return_memory()
    assert before - resident_bytes() > 60e6


def test_that_is_done_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Semaphore(0)
    monkeypatch.setattr(run, "return_memory", done.release)
    monkeypatch.setattr(run, "RETURN_S", 0.01)
    run.spare_memory.cache_clear()
    run.spare_memory()
    assert done.acquire(timeout=10)
    assert done.acquire(timeout=10)

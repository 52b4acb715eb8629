"""Waiting for what another thread is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return once it is so; fail after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)

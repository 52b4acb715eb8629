"""Every benchmark that the command lists can be run."""

from __future__ import annotations

from importlib import import_module

import pytest

from benchmarks.__main__ import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_there(name: str) -> None:
    assert callable(import_module(f"benchmarks.{name}").main)

"""What the tests of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every benchmark runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""What the tests of the benches over questions share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.asking import written


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every benchmark runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three questions over the same documents, the third with a wrong answer expected."""
    return written(tmp_path / "questions.jsonl")

"""What the tests of the benches over questions share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.asking import written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three questions over the same documents, the third with a wrong answer expected."""
    return written(tmp_path / "questions.jsonl")

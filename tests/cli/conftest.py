"""Every command runs in a folder of its own, on one thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models import saved_tiny
from tests.support.records import RECORDS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model, one token a byte."""
    return saved_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def town(working_folder: Path) -> Path:
    """A folder of six documents and the questions that they answer."""
    folder = working_folder / "town"
    folder.mkdir()
    for record in RECORDS:
        name = record.name.lower().replace(" ", "-")
        (folder / f"{name}.txt").write_text(record.text + "\n", encoding="utf-8")
    rows = [{"question": r.question, "answers": [r.workers]} for r in RECORDS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    return folder

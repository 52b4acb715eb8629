"""Damaged databases of Chroma: what would end a server is found before it serves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from samkv_integrations.chroma.client import Database, chroma_errors, open_collection
from samkv_integrations.errors import InvalidOption
from tests.cli.running import error_of

N_WRITTEN, N_WAITING = 1000, 100
"""Records whose vectors Chroma has written to files, and which it adds to them when it is asked."""

DAMAGES = {
    "header.bin": (32, "SIGSEGV"),
    "index_metadata.pickle": (300, "InternalError: .*pickle file"),
}
"""File -> to how many bytes it is cut, and what comes of it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "chroma"
    collection = open_collection(folder, "town", create=True)
    for numbers in (range(N_WRITTEN), range(N_WRITTEN, N_WRITTEN + N_WAITING)):
        ids = [str(number) for number in numbers]
        vectors = [[1.0, number] * 8 for number in numbers]
        collection.add(ids=ids, documents=ids, embeddings=vectors)
    assert {file.name for file in folder.glob("*/*")} >= DAMAGES.keys()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands look for it."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(whole, tmp_path / ".samkv" / "chroma"))


def cut(folder: Path, name: str) -> str:
    """Damage a file; returns a pattern of what is to be said."""
    (file,) = folder.glob(f"*/{name}")
    n_bytes, why = DAMAGES[name]
    os.truncate(file, n_bytes)
    return f"'town' in {folder} cannot be queried; .*{why}.*; restore that folder from a copy, or"


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_vectors_are_named(folder: Path, name: str) -> None:
    says = cut(folder, name)
    with pytest.raises(InvalidOption, match=says):
        Database(folder).check(["town"])


def test_a_sound_collection_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: no process begins where there is nothing to ask."""
    asked, run = [], subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        asked.append(command[-2:])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    for names, place in ((["town"], folder), ([], folder), (["town"], folder / "none")):
        Database(place).check(names)
    assert asked == [[str(folder), "town"]]


def test_a_slow_database_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("samkv_integrations.chroma.client.ASKING_S", 0.01)
    Database(folder).check(["town"])
    assert "did not end within" in caplog.text


def test_a_server_does_not_begin(folder: Path) -> None:
    cut(folder, "header.bin")
    said = error_of("serve", "--port", "0", "--collection", "town", "--model", "builtin")
    assert "cannot be queried" in said and "SIGSEGV" in said


def test_a_panic_is_an_error_of_ours() -> None:
    """Rust's panics are no Exception. Chroma's come from damages that differ by its release."""
    with pytest.raises(InvalidOption, match="Chroma cannot be read: index out of bounds"):
        with chroma_errors("Chroma cannot be read"):
            decoders.Strip("a", 5, 5).decode(["a"])
    with pytest.raises(KeyboardInterrupt), chroma_errors("Chroma cannot be read"):
        raise KeyboardInterrupt

"""The commands of machines that share their caches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samkv_integrations.store.folder import SECRET_VARIABLE
from tests.cli.running import error_of, rows_of
from tests.support.records import RECORDS

QUESTION = RECORDS[0].question


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SECRET_VARIABLE, "5a" * 32)
    return f"file://{tmp_path}/shared"


def files_of(folder: Path | str) -> list[str]:
    return sorted(file.name for file in Path(folder).rglob("*.safetensors"))


def second_machine() -> str:
    """The records, and no caches. On one machine a copy beside the original would be refused."""
    shutil.move(".samkv/chroma", "second/chroma")
    return "second"


def test_a_second_machine_asks_what_one_has_ingested(
    town: Path, remote: str, tmp_path: Path
) -> None:
    rows_of("ingest", str(town), "--remote", remote)
    assert files_of(tmp_path / "shared") == files_of(".samkv/kv")
    (first,) = rows_of("ask", QUESTION, "--remote", remote, "--top-k", "3")
    folder = second_machine()
    there = ("ask", QUESTION, "--dir", folder, "--remote", remote, "--top-k", "3")
    assert "give it with --model" in error_of(*there)
    (row,) = rows_of(*there, "--model", "builtin")
    assert row["answer"] == first["answer"]
    assert (row["reused"], row["chunk_misses"]) == (3, {})
    assert len(files_of("second/kv")) == 3


def test_the_remote_may_be_in_the_environment(
    town: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMKV_REMOTE", remote)
    rows_of("ingest", str(town))
    assert len(files_of(tmp_path / "shared")) == 6
    rows_of("store", "forget", "--text", RECORDS[0].text)
    assert len(files_of(tmp_path / "shared")) == 5
    (done,) = rows_of("ingest", str(town))
    assert (done["n_cached"], done["n_hit"]) == (1, 5)


def test_push_and_pull(town: Path, remote: str, tmp_path: Path) -> None:
    rows_of("ingest", str(town))
    assert [rows_of("store", "push", "--remote", remote)[0]["n_chunks"] for _ in "ab"] == [6, 0]
    assert files_of(tmp_path / "shared") == files_of(".samkv/kv")
    folder = second_machine()
    (some,) = rows_of("store", "pull", "--dir", folder, "--remote", remote, "--bytes", "100kB")
    assert 0 < some["n_chunks"] < 6
    assert some["n_chunks"] + some["n_left"] == 6
    (rest,) = rows_of("store", "pull", "--dir", folder, "--remote", remote)
    assert rest["n_chunks"] == 6 - some["n_chunks"]
    assert files_of("second/kv") == files_of(".samkv/kv")

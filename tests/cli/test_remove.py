"""``samkv remove``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samkv_integrations.chroma.client import open_collection
from tests.cli.running import error_of, ran, rows_of, run
from tests.support.records import RECORDS


def sources() -> set[str]:
    """Names of the files whose records are there."""
    opened = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    return {Path(str(row["source"])).name for row in opened.get()["metadatas"] or ()}


def n_caches() -> int:
    return sum(row["chunks"] for row in rows_of("store", "stats"))


def test_a_file_that_has_gone(town: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran("ingest", str(town), "--model", tiny)
    file = town / "krasplex-systems.txt"
    file.unlink()
    monkeypatch.setattr("samkv_integrations.engine.Engine.from_pretrained", None)
    shown = ran("remove", "town/krasplex-systems.txt")
    assert shown == "1 file, 1 record removed from collection 'documents', 1 cache deleted\n"
    assert file.name not in sources() and len(sources()) == n_caches() == len(RECORDS) - 1
    assert not [path for path in Path(".samkv/kv").rglob("*") if b"Krasplex" in _content(path)]


def test_a_folder_is_all_below_it(town: Path, tiny: str) -> None:
    (town / "deep/er").mkdir(parents=True)
    (town / "deep/er/note.txt").write_text("A note about nothing.")
    (town / "deeper.txt").write_text("Another note.")
    ran("ingest", str(town), "--model", tiny)
    shutil.rmtree(town / "deep")
    (row,) = rows_of("remove", str(town / "deep"))
    assert (row["files"], row["n_records"], row["n_chunks"], row["unknown"]) == (1, 1, 1, [])
    assert "deeper.txt" in sources() and "note.txt" not in sources()
    (row,) = rows_of("remove", str(town), str(town / "deeper.txt"))
    assert (row["files"], row["n_records"]) == (len(RECORDS) + 1,) * 2
    assert sources() == set() and n_caches() == 0
    assert "is empty" in error_of("ask", "Who?")


def test_a_cache_that_another_record_uses_stays(town: Path, tiny: str) -> None:
    shutil.copy(town / "krasplex-systems.txt", town / "copy.txt")
    ran("ingest", str(town), "--model", tiny)
    (row,) = rows_of("remove", str(town / "copy.txt"))
    assert (row["n_records"], row["n_chunks"]) == (1, 0)
    assert n_caches() == len(RECORDS)


def test_what_was_never_ingested_is_named(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    line = error_of("remove", "towm", "notes.txt")
    assert "collection 'documents' has no record of towm, notes.txt; name files or" in line
    assert len(sources()) == len(RECORDS)
    result = run("remove", "towm", "town/krasplex-systems.txt")
    assert result.exit_code == 0 and "no record is of towm\n" in result.stderr
    assert len(sources()) == len(RECORDS) - 1
    assert "unknown collection 'other'" in error_of("remove", "town", "--collection", "other")
    assert "holds no Chroma database" in error_of("remove", "town", "--dir", "elsewhere")


def test_a_namespace_removes_its_own(town: Path, tiny: str) -> None:
    tenant = ("--namespace", "tenant-8", "--collection", "letters")
    ran("ingest", str(town), "--model", tiny, *tenant)
    assert "give --namespace" in error_of("remove", str(town), "--collection", "letters")
    assert "6 caches deleted" in ran("remove", str(town), *tenant)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""

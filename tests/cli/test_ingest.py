"""``samkv ingest``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from samkv_integrations.chroma.client import open_collection
from tests.cli.running import error_of, ran, rows_of
from tests.support.records import RECORDS


def test_ingest_prefills_once(town: Path) -> None:
    shown = ran("ingest", str(town))
    assert "6 files, 6 chunks" in shown and "6 prefilled, 0 already cached" in shown
    assert "0 prefilled, 6 already cached" in ran("ingest", str(town))
    (row,) = rows_of("ingest", str(town))
    assert (row["files"], row["n_records"], row["n_cached"], row["n_hit"]) == (6, 6, 0, 6)
    assert row["bytes_on_disk"] == 0 and row["seconds"] > 0
    (held,) = rows_of("store", "stats")
    assert (held["model"], held["chunks"]) == ("builtin", 6)
    assert held["bytes"] > 0
    assert "6 chunks" in ran("store", "stats")


def test_ingest_splits_long_documents_and_forgets_what_they_no_longer_say(
    tiny: str, working_folder: Path
) -> None:
    file = working_folder / "long.md"
    file.write_text("\n\n".join(f"# Part {n}\n\n" + "Some words here. " * 9 for n in range(5)))
    (row,) = rows_of("ingest", "long.md", "--model", tiny, "--chunk-size", "100")
    collection = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    texts = collection.get(include=["documents"])["documents"]
    assert len(texts) == row["n_records"] > 5
    assert max(len(text.encode()) for text in texts) <= 100  # one token a byte
    file.write_text("Short now.")
    rows_of("ingest", "long.md", "--model", tiny, "--chunk-size", "100")
    assert collection.get(include=["documents"])["documents"] == ["Short now."]


def test_ingest_releases_what_documents_no_longer_say(town: Path, tiny: str) -> None:
    rows_of("ingest", str(town), "--model", tiny)
    (town / "krasplex-systems.txt").write_text("Something else.")
    rows_of("ingest", str(town), "--model", tiny)
    (held,) = rows_of("store", "stats")
    assert held["chunks"] == 6


def test_ingest_leaves_its_own_folder_and_hidden_files_out(town: Path) -> None:
    (town / ".hidden.txt").write_text("Nobody shall read this.")
    rows_of("ingest", str(town), "--dir", str(town / "kept"))
    assert list((town / "kept").rglob("*.txt")), "the caches hold no text: nothing to leave out"
    (row,) = rows_of("ingest", str(town), "--dir", str(town / "kept"))
    assert row["files"] == 6


def test_a_document_is_the_same_by_whatever_path(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran("ingest", "town", "--dir", "kept")
    monkeypatch.chdir(town)
    ran("ingest", ".", "--dir", "../kept")
    collection = open_collection(town.parent / "kept/chroma", "documents", create=False)
    assert collection.count() == len(RECORDS)


def test_a_chunk_longer_than_the_context_window(working_folder: Path, tiny: str) -> None:
    (working_folder / "long.txt").write_text("words " * 500)
    line = error_of("ingest", "long.txt", "--model", tiny, "--chunk-size", "5000")
    assert "2999 tokens is longer than the 2047" in line


def test_a_long_document_without_the_splitter(
    working_folder: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "semantic_text_splitter", None)
    (working_folder / "long.txt").write_text("words " * 100)
    line = error_of("ingest", "long.txt", "--model", tiny, "--chunk-size", "100")
    assert "pip install 'samkv-integrations[chroma]'" in line

"""``samkv store``, and stores that do not fit the command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from tests.cli.running import error_of, ran, rows_of, run
from tests.support.models import tiny_model


def test_sync_mends_what_went_past_it(town: Path, tiny: str) -> None:
    model = ("--model", tiny)
    ran("ingest", str(town), *model)
    documents = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    first, *_ = documents.get()["ids"]
    documents.delete(ids=[first])
    notes = open_collection(Path(".samkv/chroma").resolve(), "notes", create=True)
    notes.add(ids=["n", "bare"], documents=["A note.", " "], embeddings=[[1.0]] * 2)
    sync = ("store", "sync", *model)

    def summary(*options: str) -> list[tuple[Any, ...]]:
        fields = ("collection", "n_records", "n_cached", "n_linked", "n_skipped", "n_pruned")
        rows = rows_of(*sync, *options)
        assert all(
            set(fields) | {"n_in_grace", "n_evicted", "bytes_freed", "seconds"} == set(r)
            for r in rows
        )
        return [tuple(row[field] for field in fields) for row in rows]

    result = run(*sync)
    assert "syncing notes" in result.stderr and "syncing" not in result.stdout
    assert summary("--grace", "0") == [("documents", 5, 0, 0, 0, 0), ("notes", 2, 0, 0, 1, 1)]
    (held,) = rows_of("store", "stats")
    assert held["chunks"] == 6  # five records and a note
    assert summary("--collection", "notes", "--collection", "documents", "--grace", "0") == [
        ("notes", 2, 0, 0, 1, 0), ("documents", 5, 0, 0, 0, 0),
    ]  # fmt: skip


def test_a_store_of_other_bits(town: Path, tiny: str) -> None:
    wide = ("--model", tiny, "--store-bits", "16")
    ran("ingest", str(town), *wide)
    assert [row["store_bits"] for row in rows_of("store", "stats")] == [16]
    for command in (("ask", "Who?"), ("store", "sync")):
        line = error_of(*command, "--store-bits", "4")
        assert (
            "store_bits is 4 here and 16 there; next step: ingest again, or give --store-bits=16"
            in line
        )
    (row,) = rows_of("ask", "Who?", "--max-new-tokens", "1")
    assert (row["found"], row["chunk_misses"]) == (4, {})
    assert rows_of("store", "sync")[0]["n_cached"] == 0


class TestForget:
    def test_documents_and_texts(self, town: Path, tiny: str) -> None:
        ran("ingest", str(town), "--model", tiny, "--chunk-size", "60")
        (before,) = rows_of("store", "stats")
        documents = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
        texts = documents.get(include=["documents"])["documents"] or []
        document = (town / "hesaris-optics.txt").read_text()
        mine = {text for text in texts if text in document}
        assert len(mine) > 1
        deleted = ("store", "forget", str(town / "hesaris-optics.txt"))
        assert rows_of(*deleted) == [{"n_chunks": len(mine)}]
        assert rows_of(*deleted) == [{"n_chunks": 0}]
        held = next(text for text in texts if text not in mine)
        shown = ran("store", "forget", "--text", f" {held}\n")
        assert "1 chunk deleted" in shown and "records of" in shown
        (after,) = rows_of("store", "stats")
        assert before["chunks"] - after["chunks"] == len(mine) + 1

    def test_files_are_read_as_they_were_at_the_ingest(self, town: Path, tiny: str) -> None:
        file = town / "bells.txt"
        file.write_text("Die Glöckner läuten früh.", "utf-16-le")
        ran("ingest", str(file), "--model", tiny, "--encoding", "utf-16-le")
        assert "name its encoding" in error_of("store", "forget", str(file))
        assert "--max-file" in error_of("store", "forget", str(file), "--max-file", "20")
        assert "read as utf-16-be" in ran("store", "forget", str(file), "--encoding", "utf-16-be")
        assert rows_of("store", "forget", str(file), "--encoding", "utf-16-le") == [{"n_chunks": 1}]


@pytest.fixture
def filled(town: Path, tiny: str) -> ChunkStore:
    """The store of six documents."""
    ran("ingest", str(town), "--model", tiny)
    return ChunkStore(".samkv/kv")


def damage(store: ChunkStore) -> Path:
    (made_by,) = store.fingerprints()
    file = store.file(store.keys()[0], made_by.digest)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    return file


class TestStats:
    def test_by_model_and_namespace(self, filled: ChunkStore, tiny: str) -> None:
        Engine(tiny_model(), ChunkStore(filled.path, namespace="tenant")).cache_chunks(["A note."])
        for _ in range(2):
            ran("ask", "Who?", "--model", tiny, "--max-new-tokens", "1", "--method", "reuse")
        rows = {row["namespace"]: row for row in rows_of("store", "stats")}
        assert {name: row["chunks"] for name, row in rows.items()} == {"": 6, "tenant": 1}
        assert rows["tenant"]["hit_rate"] is None
        shown = ran("store", "stats")
        assert "7 chunks" in shown and re.search(r"^tenant +", shown, re.M)


class TestVerify:
    def test_damage_is_found_and_deleted(self, filled: ChunkStore) -> None:
        assert rows_of("store", "verify")[0]["n_chunks"] == 6
        file = damage(filled)
        result = run("store", "verify")
        assert result.exit_code == 1
        assert re.search(r"^ +6 +\S+ kB +1 +0$", result.stdout, re.M), result.stdout
        assert file.stem in result.stdout and "verifying" in result.stderr
        assert "'samkv store verify --repair' deletes damaged caches" in result.stdout
        assert file.exists()
        (row,) = rows_of("store", "verify", "--repair")
        assert (row["n_repaired"], [each["reason"] for each in row["damaged"]]) == (1, ["corrupt"])
        assert not file.exists()
        assert rows_of("store", "verify")[0]["n_chunks"] == 5

    def test_gc_forgets_the_text_of_a_damaged_cache(self, filled: ChunkStore, tiny: str) -> None:
        damage(filled)
        assert "'samkv store sync' computes all" in ran("store", "verify", "--repair").replace(
            "\n", " "
        )
        (row,) = rows_of("store", "gc")
        assert (row["bytes_freed"], row["n_forgotten"]) == (0, 1)
        assert "unfinished" in ran("store", "gc")
        assert rows_of("store", "sync", "--model", tiny)[0]["n_cached"] == 1


class TestBudget:
    def test_is_shown_and_set(self, filled: ChunkStore) -> None:
        taken = filled.stats().bytes
        budget = ("store", "budget")
        whole = {"namespace": None, "bytes": taken, "max_bytes": None}
        mine = {"namespace": "", "bytes": taken, "max_bytes": None}
        assert rows_of(*budget) == [whole, mine]
        assert rows_of(*budget, "--max-bytes", "20GB")[0]["max_bytes"] == 20 * 10**9
        ran(*budget, "--max-bytes", "1.5 MiB", "--namespace", "tenant")
        quota = {"namespace": "tenant", "bytes": 0, "max_bytes": 3 * 2**19}
        assert quota in rows_of(*budget)
        shown = ran(*budget, "--max-bytes", str(taken // 2))
        assert 0 < (n_left := filled.stats().n_chunks) < 6
        assert f"{6 - n_left} caches evicted" in shown
        assert rows_of(*budget)[0]["bytes"] <= taken // 2
        assert quota in rows_of(*budget, "--max-bytes", "none")
        assert rows_of(*budget, "--max-bytes", "none", "--namespace", "tenant")[0] == {
            "namespace": None, "bytes": filled.stats().bytes, "max_bytes": None,
        }  # fmt: skip
        assert filled.index.budget() == (None, {})
        shown = ran(*budget)
        assert "all" in shown

    def test_holds_during_an_ingest(self, town: Path, tiny: str) -> None:
        ran("ingest", str(town), "--model", tiny)
        taken = ChunkStore(".samkv/kv").stats().bytes
        args = ("--model", tiny, "--dir", "other", "--max-bytes")
        shown = ran("ingest", str(town), *args, str(taken - 1))
        assert "of these chunks were evicted to make room" in shown
        assert ChunkStore("other/kv").stats().bytes < taken
        (row,) = rows_of("store", "sync", "--model", tiny, "--dir", "other")
        assert row["n_evicted"] > 0 == row["n_cached"]
        assert "such as 20GB" in error_of("ingest", str(town), *args, "all")


def test_sync_caches_for_another_model_that_is_given(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town", "--dtype", "float32")
    assert "holds no cache of the loaded model" in error_of("store", "sync", "--dtype", "bfloat16")
    other = ("--model", "builtin", "--dtype", "bfloat16")
    (row,) = rows_of("store", "sync", *other)
    assert row["n_cached"] == row["n_records"] > 0
    kept = {each["dtype"]: each["chunks"] for each in rows_of("store", "stats")}
    assert kept == {"float32": row["n_records"], "bfloat16": row["n_records"]}

"""``samkv store``, and stores that do not fit the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from tests.cli.running import error_of, ran, rows_of, run
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.old_store import old_store


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
        assert all(set(fields) | {"n_in_grace", "bytes_freed", "seconds"} == set(r) for r in rows)
        return [tuple(row[field] for field in fields) for row in rows]

    assert summary("--no-build", "--no-prune", "--collection", "documents") == [
        ("documents", 5, 0, 0, 0, 0)
    ]
    assert summary("--no-build") == [("documents", 5, 0, 0, 0, 0), ("notes", 2, 0, 1, 1, 0)]
    result = run(*sync)
    assert "syncing notes" in result.stderr and "syncing" not in result.stdout
    assert "0 unused caches deleted (0 B), 1 kept for now" in result.stdout
    assert summary("--grace", "0") == [("documents", 5, 0, 0, 0, 0), ("notes", 2, 0, 0, 1, 1)]
    (held,) = rows_of("store", "stats")
    assert held["chunks"] == 6  # five records and a note
    assert summary("--collection", "notes", "--collection", "documents", "--grace", "0") == [
        ("notes", 2, 0, 0, 1, 0), ("documents", 5, 0, 0, 0, 0),
    ]  # fmt: skip


def test_sync_says_what_is_wrong(town: Path, tiny: str, working_folder: Path) -> None:
    sync = ("store", "sync", "--model", tiny)
    ran("ingest", str(town), "--model", tiny)
    assert "'papers'; known: documents" in error_of(*sync, "--collection", "papers")
    assert "grace_s=-1.0" in error_of(*sync, "--grace", "-1")
    assert "dtype is 'bfloat16' here" in error_of(*sync, "--dtype", "bfloat16")
    empty = open_collection(working_folder / "hollow/chroma", "town", create=True)
    empty._client.delete_collection("town")
    assert "hollow/chroma holds no collection" in error_of(*sync, "--dir", "hollow")


def test_stats_name_the_chunks_of_an_older_format(working_folder: Path) -> None:
    old_store(working_folder / ".samkv/kv")
    (held,) = rows_of("store", "stats")
    assert (held["format_version"], held["chunks"], held["store_bits"]) == (1, 2, 16)
    assert "2 chunks are of an older format and not used; ingest them again" in ran(
        "store", "stats"
    )


def test_a_store_of_another_model_or_dtype(town: Path, tiny: str, working_folder: Path) -> None:
    ran("ingest", str(town), "--model", tiny)
    other = working_folder / "other"
    hf_model("llama", seed=1).save_pretrained(other)
    byte_tokenizer(bos=True).save_pretrained(other)
    assert "weights is" in error_of("ask", "Who?", "--model", "other")
    line = error_of("ask", "Who?", "--model", tiny, "--dtype", "bfloat16")
    assert "dtype is 'bfloat16' here and 'float32' there" in line


def test_a_store_of_other_bits(town: Path, tiny: str) -> None:
    wide = ("--model", tiny, "--store-bits", "16")
    ran("ingest", str(town), *wide)
    assert [row["store_bits"] for row in rows_of("store", "stats")] == [16]
    for command in (("ask", "Who?"), ("store", "sync")):
        line = error_of(*command, "--model", tiny)
        assert "store_bits is 4 here and 16 there; next step: give store_bits=16" in line
    (row,) = rows_of("ask", "Who?", *wide, "--max-new-tokens", "1")
    assert (row["found"], row["chunk_misses"]) == (4, {})
    assert rows_of("store", "sync", *wide)[0]["n_cached"] == 0


def test_a_store_of_a_newer_format_version(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    Path(".samkv/kv/store.json").write_text('{"format_version": 99}')
    for command in (("ask", "Who?"), ("ingest", str(town))):
        assert "format version 99" in error_of(*command, "--model", tiny)
    assert "format version 99" in error_of("store", "stats")


class TestForget:
    def test_documents_and_texts(self, town: Path, tiny: str) -> None:
        ran("ingest", str(town), "--model", tiny, "--chunk-size", "60")
        (before,) = rows_of("store", "stats")
        document = town / "hesaris-optics.txt"
        chunks = sum(
            file.read_text() in document.read_text() for file in Path(".samkv/kv").rglob("*.txt")
        )
        assert chunks > 1
        assert rows_of("store", "forget", str(document)) == [{"n_chunks": chunks}]
        assert rows_of("store", "forget", str(document)) == [{"n_chunks": 0}]
        held = next(Path(".samkv/kv").rglob("*.txt"))
        shown = ran("store", "forget", "--text", f" {held.read_text()}\n")
        assert "1 chunks deleted" in shown and "records of" in shown
        assert not held.exists() and not held.with_suffix(".safetensors").exists()
        (after,) = rows_of("store", "stats")
        assert before["chunks"] - after["chunks"] == chunks + 1

    def test_of_a_namespace(self, tiny: str) -> None:
        for name in ("", "tenant"):
            store = ChunkStore(".samkv/kv", namespace=name)
            Engine(tiny_model(), store, block_size=8).cache_chunks(["A note of Tobias."])
        asked = ("store", "forget", "--text", "A note of Tobias.")
        assert rows_of(*asked, "--namespace", "nobody") == [{"n_chunks": 0}]
        assert rows_of(*asked, "--namespace", "tenant") == [{"n_chunks": 1}]
        (held,) = rows_of("store", "stats")
        assert held["chunks"] == 1

    def test_says_what_is_wrong(self, working_folder: Path) -> None:
        assert "give --text" in error_of("store", "forget")
        assert "give --text" in error_of("store", "forget", "--text", " ")
        assert "does not exist" in error_of("store", "forget", "gone.txt")
        assert "'samkv ingest' used" in error_of("store", "forget", "--text", "a")
        assert not list(working_folder.iterdir())

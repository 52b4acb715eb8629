"""Commands run a GGUF file on llama.cpp, and remember which runtime has cached a collection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import error_of, ran, rows_of
from tests.support.gguf_files import model_for_gguf, write_gguf
from tests.support.llama_cpp import with_llama_cpp

pytestmark = with_llama_cpp

NOTE = Path(".samkv/kv/ingested.json")
QUESTION = ("ask", "When was the harbour built?", "--max-tokens", "2", "--no-chat")


@pytest.fixture
def gguf(working_folder: Path) -> str:
    """A tiny model, and a folder with a document."""
    Path("docs").mkdir()
    Path("docs/a.txt").write_text("The harbour of Ostmere was built in 1874.")
    return str(write_gguf(working_folder / "tiny.gguf", model_for_gguf("llama")))


def runtimes() -> list[str]:
    return [one["runtime"] for one in json.loads(NOTE.read_text()).values()]


def test_a_collection_is_asked_with_the_runtime_of_its_ingest(gguf: str) -> None:
    ran("ingest", "docs", "--model", gguf, "--n-threads", "1", "--n-ctx", "1024")
    assert runtimes() == ["llama_cpp"]
    (row,) = rows_of(*QUESTION, "--method", "reuse", "--n-ctx", "1024")
    assert row["reused"] == 1
    told = error_of(*QUESTION, "--runtime", "transformers")
    assert told.endswith("--runtime=llama_cpp") and "--dtype" not in told


def test_transformers_is_chosen_by_name(gguf: str) -> None:
    ran("ingest", "docs", "--model", gguf, "--runtime", "transformers", "--dtype", "float32")
    assert runtimes() == ["transformers"]
    (row,) = rows_of(*QUESTION, "--method", "reuse")
    assert row["reused"] == 1
    assert "kept from its cache" in ran("inspect", *QUESTION[1:], "--method", "reuse")


def test_a_folder_of_before_was_ingested_with_transformers(gguf: str) -> None:
    ran("ingest", "docs", "--model", gguf, "--runtime", "transformers")
    note = {
        key: {name: value for name, value in one.items() if name != "runtime"}
        for key, one in json.loads(NOTE.read_text()).items()
    }
    NOTE.write_text(json.dumps(note))
    (row,) = rows_of(*QUESTION, "--method", "reuse")
    assert row["reused"] == 1


def test_a_collection_that_is_ingested_again_takes_the_runtime_that_is_given(gguf: str) -> None:
    ran("ingest", "docs", "--model", gguf, "--runtime", "transformers", "--dtype", "float32")
    ran("ingest", "docs", "--runtime", "llama_cpp")  # whose dtype is its own
    assert runtimes() == ["llama_cpp"]
    (row,) = rows_of(*QUESTION, "--method", "reuse")
    assert row["reused"] == 1


def test_what_reads_attention_names_the_other_runtime(gguf: str) -> None:
    ran("ingest", "docs", "--model", gguf)
    told = error_of("inspect", *QUESTION[1:])
    assert "attention cannot be inspected" in told and told.endswith("--runtime=transformers")


def test_the_doctor_examines_it(gguf: str) -> None:
    checks = {row["check"]: row for row in rows_of("doctor", "--model", gguf)}
    assert [*checks] == ["chunks", "prefix reuse", "blend", "speed"]
    assert all(check["ok"] for check in checks.values())
    (check,) = rows_of("doctor", "--model", gguf, "--type-k", "f32", "--type-v", "f32")
    assert check["ok"] and "leave out type_k and type_v" in str(check["detail"])

"""``--embedding``: chunks that are found by vectors too, and what a collection remembers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from samkv_integrations.chroma.client import open_collection
from tests.cli.running import error_of, ran, rows_of
from tests.support.chroma_server import free_port
from tests.support.embedding_server import EmbeddingServer, embedding_server
from tests.support.records import RECORDS

PARAPHRASE = "Which gallery?"


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with embedding_server() as served:
        yield served


@pytest.fixture
def notes(working_folder: Path) -> Path:
    folder = working_folder / "notes"
    folder.mkdir()
    for number, text in enumerate([RECORDS[0].text, "The museum shows maps.", RECORDS[1].text]):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def first(*arguments: str) -> str:
    """The name of the file that a question finds first."""
    (row,) = rows_of("ask", PARAPHRASE, "--max-new-tokens", "1", "--method", "reuse", *arguments)
    return Path(row["sources"][0]).name


def metadata(name: str = "documents") -> dict[str, object]:
    return dict(open_collection(Path(".samkv/chroma").resolve(), name, create=False).metadata or {})


def test_the_collection_remembers_its_embedding(notes: Path, server: EmbeddingServer) -> None:
    by = ("--embedding", "tiny", "--embedding-url", server.url)
    ran("ingest", str(notes), *by)
    assert metadata() == {"samkv_embedding": "tiny", "samkv_embedding_url": server.url}
    assert first() == "1.txt"
    assert first("--embedding", "tiny") == "1.txt"
    assert "'tiny'" in error_of("ask", PARAPHRASE, "--embedding", "other")
    ran("inspect", PARAPHRASE, "--max-new-tokens", "1")
    assert server.texts[-1] == PARAPHRASE
    # a second ingest uses it, for new texts alone
    server.requests.clear()
    (notes / "3.txt").write_text("The boat is late.", encoding="utf-8")
    ran("ingest", str(notes))
    assert server.texts[1:] == ["The boat is late."]  # after the trial
    assert metadata() == {"samkv_embedding": "tiny", "samkv_embedding_url": server.url}


def test_another_embedding_is_refused(notes: Path, server: EmbeddingServer) -> None:
    by = ("--embedding-url", server.url, "--embedding")
    ran("ingest", str(notes), *by, "tiny")
    other = error_of("ingest", str(notes), *by, "other")
    assert f"--embedding=other; collection 'documents' was ingested with embedding 'tiny' at {server.url}" in other  # fmt: skip # noqa: E501
    assert "give another --collection" in other and "'samkv remove' first" in other
    asked = error_of("ask", PARAPHRASE, "--embedding", "chroma")
    assert "--embedding=chroma; collection 'documents' was ingested with embedding 'tiny'" in asked
    ran("ingest", str(notes), *by, "other", "--collection", "second")
    # both next steps work
    ran("remove", str(notes))
    ran("ingest", str(notes), *by, "other")
    assert metadata()["samkv_embedding"] == metadata("second")["samkv_embedding"] == "other"


def test_a_collection_of_words_stays_one(notes: Path, server: EmbeddingServer) -> None:
    by = ("--embedding", "tiny", "--embedding-url", server.url)
    ran("ingest", str(notes))
    assert metadata() == {} and first() == "0.txt"
    refused = error_of("ingest", str(notes), *by)
    assert "was ingested without an embedding; give another --collection" in refused
    assert "without an embedding; leave it out" in error_of("ask", PARAPHRASE, *by)
    assert metadata() == {}
    ran("remove", str(notes))
    ran("ingest", str(notes), *by)  # with vectors of another dimension
    assert first() == "1.txt"


def test_an_endpoint_that_moved(notes: Path, server: EmbeddingServer) -> None:
    with embedding_server() as former:
        ran("ingest", str(notes), "--embedding", "tiny", "--embedding-url", former.url)
    assert "does not answer" in error_of("ask", PARAPHRASE)
    assert "does not answer" in error_of("serve", "--port", "0", "--collection", "documents")
    assert first("--embedding-url", server.url) == "1.txt"
    assert metadata()["samkv_embedding_url"] == former.url
    ran("ingest", str(notes), "--embedding-url", server.url)
    assert metadata()["samkv_embedding_url"] == server.url
    assert first() == "1.txt"


def test_a_failed_ingest_leaves_no_collection(notes: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    assert "does not answer" in error_of("ingest", str(notes), "--embedding", "tiny",
                                         "--embedding-url", url)  # fmt: skip
    assert "--embedding-url" in error_of("ingest", str(notes), "--embedding-url", url)
    assert "is not a folder" in error_of("ingest", str(notes), "--embedding", "./none")
    assert not Path(".samkv/chroma").exists()


def test_a_key_is_neither_stored_nor_shown(
    notes: Path, server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    by = ("--embedding", "tiny", "--embedding-url", server.url)
    said = ran("ingest", str(notes), *by) + ran("ask", PARAPHRASE, *by)
    assert server.keys == ["Bearer sk-very-secret"] * len(server.keys) and server.keys
    stored = [file.read_bytes() for file in Path(".samkv").rglob("*") if file.is_file()]
    assert not any(b"very-secret" in content for content in stored)
    assert "very-secret" not in said


def test_machines_that_share_chroma_share_the_embedding(
    notes: Path, server: EmbeddingServer, chroma_port: int
) -> None:
    chroma = ("--chroma", f"http://127.0.0.1:{chroma_port}", "--collection", "shared-notes")
    ran("ingest", str(notes), *chroma, "--embedding", "tiny", "--embedding-url", server.url)
    assert first(*chroma) == "1.txt"


def test_tune_uses_it(notes: Path, server: EmbeddingServer) -> None:
    ran("ingest", str(notes), "--embedding", "tiny", "--embedding-url", server.url)
    questions = [{"question": f"gallery {n}", "answers": ["maps"]} for n in range(6)]
    file = notes.parent / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")
    server.requests.clear()
    ran("tune", "--questions", str(file), "--minutes", "0.001", "--max-new-tokens", "1")
    assert {one["question"] for one in questions} <= {*server.texts}

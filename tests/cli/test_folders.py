"""Caches and records of a program, in folders of any name: ``--kv-dir`` and ``--chroma``."""

from __future__ import annotations

from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma import open_collection
from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.chroma.link import ChromaLink
from tests.cli.running import error_of, ran, rows_of
from tests.cli.test_serve import PROMPT, posted, serving
from tests.support.records import RECORDS, TEXTS

KV = ("--kv-dir", "my-caches")
CHROMA = ("--chroma", "my-chroma")
MODEL = ("--model", "builtin")
NAMES = [record.name for record in RECORDS]


@pytest.fixture
def program(working_folder: Path) -> None:
    """What a program has left behind."""
    engine = Engine.from_pretrained("builtin", store=ChunkStore("my-caches"))
    # absolute, because Chroma remembers a folder by its name
    collection = open_collection(Path("my-chroma").resolve(), "notes", create=True)
    link = ChromaLink(collection, engine)
    link.add(NAMES, TEXTS, HashingEmbedding().embed(TEXTS), [{"source": name} for name in NAMES])


@pytest.mark.usefixtures("program")
def test_commands_of_the_store() -> None:
    (row,) = rows_of("store", "stats", *KV)
    assert row["chunks"] == len(TEXTS)
    (row,) = rows_of("store", "verify", *KV)
    assert (row["n_chunks"], row["damaged"]) == (len(TEXTS), [])
    assert rows_of("store", "budget", *KV)[0]["bytes"] > 0
    rows_of("store", "gc", *KV)
    (row,) = rows_of("store", "sync", *KV, *CHROMA, *MODEL)
    assert (row["collection"], row["n_records"], row["n_pruned"]) == ("notes", len(TEXTS), 0)
    (row,) = rows_of("store", "forget", "--text", TEXTS[0], *KV)
    assert row["n_chunks"] == 1


@pytest.mark.usefixtures("program")
def test_questions_and_documents(town: Path) -> None:
    (row,) = rows_of("ask", RECORDS[0].question, *KV, *CHROMA, *MODEL, "--method", "reuse")
    assert row["reused"] == len(row["sources"]) > 0
    ran("ingest", str(town), "--collection", "town", *KV, *CHROMA)
    # the model of that ingest is remembered beside the caches
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town", *KV, *CHROMA)
    assert row["found"] > 0
    assert not Path(".samkv").exists()


@pytest.mark.usefixtures("program")
def test_a_server() -> None:
    options = ("--collection", "notes", "--method", "reuse")
    with serving(*KV, *CHROMA, *MODEL, *options) as (_, address):
        body = {"model": "builtin", "prompt": PROMPT, "max_tokens": 2}
        assert b'"reused":1' in posted(address, "/v1/completions", body).read().replace(b" ", b"")


def test_folders_that_do_not_exist(working_folder: Path) -> None:
    assert "or the kv_dir of a program as --kv-dir" in error_of("store", "stats", *KV)
    line = error_of("ask", "Q?", *KV, *CHROMA)
    assert "Chroma server 'my-chroma'; give http://HOST:PORT" in line
    assert line.endswith("or a folder that exists")

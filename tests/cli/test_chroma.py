"""``--chroma``: commands whose records are on a Chroma server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from samkv_integrations.chroma import client as client_module
from samkv_integrations.chroma.client import Database
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.scheduler import Scheduler
from tests.cli.running import error_of, ran, rows_of
from tests.support.chroma_server import free_port
from tests.support.load import from_caches
from tests.support.records import RECORDS, TEXTS

QUESTION = RECORDS[1].question


@pytest.fixture
def server(chroma_port: int) -> str:
    return f"http://127.0.0.1:{chroma_port}"


def app_on(server: str, *collections: str) -> FastAPI:
    database = Database(Path(".samkv/chroma").resolve(), server)
    folder = Path(".samkv").resolve()
    scheduler = Scheduler(load_model("builtin", device="cpu"))
    tenancy = Tenancy(scheduler, folder, database=database, method="reuse")
    keys = ApiKeys("", Tenant(collections=collections))
    return create_app(tenancy, keys, Settings(model_name="builtin"))


def test_ask_retrieves_from_a_server(town: Path, server: str) -> None:
    ran("ingest", str(town), "--collection", "asked", "--chroma", server)
    assert not Path(".samkv/chroma").exists()
    ask = ("ask", QUESTION, "--collection", "asked", "--method", "reuse")
    (row,) = rows_of(*ask, "--chroma", server)
    assert row["answer"].strip(" .") == RECORDS[1].workers
    assert row["reused"] == len(row["sources"]) == 4
    assert row["sources"][0].endswith("/krasplex-systems.txt")
    assert "unknown collection 'aksed'" in error_of("ask", "x", "--collection", "aksed",
                                                    "--chroma", server)  # fmt: skip


@pytest.mark.parametrize(
    "command", ["ask x", "inspect x", "serve --port 0 --collection notes", "store sync"]
)
def test_an_address_that_is_none_and_a_server_that_is_not_there(town: Path, command: str) -> None:
    line = error_of(*command.split(), "--chroma", "127.0.0.1:8000")
    assert "Chroma server '127.0.0.1:8000'; give http://HOST:PORT" in line
    port = free_port()
    line = error_of(*command.split(), "--chroma", f"http://127.0.0.1:{port}")
    assert f"Chroma at 127.0.0.1:{port} cannot be reached" in line


async def test_a_server_asks_one_client_for_all_its_questions(
    town: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chromadb never lets go of a client of a server: one for each question would be a leak."""
    ran("ingest", str(town), "--collection", "served", "--chroma", server)
    made: list[object] = []
    make = client_module.client_of_server

    def counted(*args: object, **options: object) -> object:
        made.append(args)
        return make(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("samkv_integrations.chroma.client.client_of_server", counted)
    app = app_on(server, "served")
    asked = {"question": QUESTION, "top_k": 3, "max_tokens": 8}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for _ in range(3):
            found = (await client.post("/v1/samkv/ask", json=asked)).json()
            assert found["answer"].strip(" .") == RECORDS[1].workers
            assert from_caches(found["samkv"]) == 3
            assert {source["text"] for source in found["sources"]} < {*TEXTS}
    assert len(made) == 1

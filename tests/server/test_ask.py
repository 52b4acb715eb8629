"""Questions about collections: retrieved in the server, answered as the engine answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chromadb import Collection
from chromadb.errors import InternalError

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.embedding import EmbeddingName, LearnedEmbedding, open_remembering
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import Retrieved
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.plan.kept_costs import keep_costs
from samkv_integrations.prompt.rag_template import rag_prompt
from samkv_integrations.server.tenancy import Tenant
from tests.support.embedding_server import embedding_server
from tests.support.records import RECORDS, TEXTS, builtin
from tests.support.served_town import BLUE, KEYS, RED, Town, events_of, fill
from tests.support.stores import chunk_files

PATH = "/v1/samkv/ask"
QUESTION = RECORDS[0].question


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a collection that is only read."""
    folder = tmp_path_factory.mktemp("filled")
    fill(folder, "town")
    return folder


@pytest.fixture
def town(filled: Path, tmp_path: Path) -> Town:
    shutil.copytree(filled, tmp_path / "own")
    return Town(tmp_path / "own", collections=["town"], method="reuse")


@pytest.mark.parametrize("chat", [False, True])
async def test_the_answer_is_the_engines_own(town: Town, chat: bool) -> None:
    body = {"question": QUESTION, "top_k": 3, "max_tokens": 8, "chat": chat}
    found = await town.json("POST", PATH, body)
    link = town.tenancy.link(Tenant(collections=("town",)), "town")
    records = link.search(QUESTION, 3)
    texts = [record.text for record in records]
    prompt = rag_prompt(QUESTION, texts, chat=chat)
    answer = town.engine().generate(prompt, texts, max_new_tokens=8)
    assert found["answer"] == answer.text
    assert RECORDS[0].workers in found["answer"]
    assert found["finish_reason"] == answer.finish_reason
    assert found["sources"] == [
        {"id": r.id, "source": r.metadata["source"], "text": r.text, "distance": r.distance}
        for r in records
    ]
    report = found["samkv"]
    assert (report["found"], report["reused"], report["method"]) == (3, 3, "reuse")
    assert found["model"] == report["model"] == "town-model"
    assert found["usage"]["prompt_tokens"] == answer.report.prompt_tokens
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_stream_has_sources_then_text_then_the_report(town: Town) -> None:
    body = {"question": QUESTION, "top_k": 2, "max_tokens": 8, "method": "samkv-guided"}
    whole = await town.json("POST", PATH, body)
    first, *pieces, end = events_of(await town.send("POST", PATH, {**body, "stream": True}))
    assert first == {"object": "samkv.answer.sources", "sources": whole["sources"]}
    assert {piece["object"] for piece in pieces} == {"samkv.answer.text"}
    assert len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == whole["answer"]
    assert end.keys() == whole.keys() - {"answer", "sources"}
    assert end["object"] == "samkv.answer.end"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert end["usage"][name] == whole["usage"][name]
    # the same prompt again is in memory but for its last token
    cached = end["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == end["usage"]["prompt_tokens"] - 1
    assert end["samkv"]["method"] == "samkv-guided"


async def test_a_chunk_without_a_cache_is_an_error_that_names_no_path(town: Town) -> None:
    store = town.engine().store.path
    assert store is not None
    for file in chunk_files(store):
        (store / file).unlink()
    body = {"question": QUESTION, "top_k": 2, "max_tokens": 1, "on_miss": "error"}
    reply = await town.send("POST", PATH, body)
    error = json.loads(reply.text)["error"]
    assert (reply.status_code, error["code"]) == (400, "chunk_not_cached")
    assert "has no usable cache (absent); ingest it again, or use on_miss=" in error["message"]
    assert str(store) not in reply.text


async def test_the_estimate_says_what_it_is_made_of(town: Town) -> None:
    body = {"question": QUESTION, "max_tokens": 1}
    assumed = await town.json("POST", PATH, body)
    assert (assumed["estimated_from"], assumed["estimated_full_prefill_s"]) == ("assumed", None)
    costs = CostModel(layer_s=1.0, token_s=0.5, pair_s=0.0, entry_s=0.0, read_s=0.0)
    keep_costs(builtin(), town.engine().store, costs)
    again = Town(town.folder, collections=["town"], method="reuse")
    measured = await again.json("POST", PATH, body)
    assert measured["estimated_from"] == "measured"
    n_tokens = measured["usage"]["prompt_tokens"]
    assert measured["estimated_full_prefill_s"] == builtin().n_layers * (1 + 0.5 * n_tokens)


async def test_a_collection_is_named_where_there_are_several(filled: Path, tmp_path: Path) -> None:
    for names, message in (
        (["town", "other"], "collection is missing; give one of: town, other"),
        ([], "this key may not ask any collection; "),
    ):
        town = Town(filled, collections=names)
        error = await town.error(400, "POST", PATH, {"question": QUESTION})
        assert error["param"] == "collection"
        assert error["message"].startswith(message)
    several = Town(filled, collections=["other", "town"])
    found = await several.json("POST", PATH, {"question": QUESTION, "collection": "town"})
    assert found["sources"][0]["text"] == TEXTS[0]
    listed = await several.json("GET", "/v1/samkv/collections")
    assert listed == {"object": "list", "data": [{"id": "other"}, {"id": "town"}]}


async def test_another_tenants_collection_is_like_one_that_is_not_there(tmp_path: Path) -> None:
    fill(tmp_path, "red-town", "red", TEXTS[:3])
    fill(tmp_path, "blue-town", "blue", TEXTS[3:])
    town = Town(tmp_path, keys=KEYS, method="reuse")
    body = {"question": RECORDS[4].question}
    assert (await town.error(401, "POST", PATH, body))["code"] == "invalid_api_key"
    found = await town.json("POST", PATH, body, key=BLUE)
    assert {source["text"] for source in found["sources"]} == set(TEXTS[3:])
    assert found["samkv"]["reused"] == 3
    errors = []
    for name in ("blue-town", "grey-town"):
        asked = {**body, "collection": name}
        errors.append(await town.error(404, "POST", PATH, asked, key=RED))
        errors[-1]["message"] = errors[-1]["message"].replace(name, "NAME")
    assert errors[0] == errors[1]
    assert errors[0]["code"] == "collection_not_found"
    assert "known: red-town, shared" in errors[0]["message"]
    # one that its key names and that is gone lists no collection of others either
    gone = await town.error(404, "POST", PATH, {**body, "collection": "shared"}, key=RED)
    assert "blue" not in gone["message"]
    listed = await town.json("GET", "/v1/samkv/collections", key=BLUE)
    assert listed["data"] == [{"id": "blue-town"}]


async def test_a_database_that_is_gone_is_not_named(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(town.folder / "chroma")
    error = await town.error(500, "POST", PATH, {"question": QUESTION})
    assert error["code"] == "store_error"
    assert str(town.folder) not in error["message"]
    assert f"{town.folder / 'chroma'} holds no Chroma database" in caplog.text


async def test_what_chroma_says_is_not_passed_on(
    town: Town, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InternalError("unable to open /srv/secret/index")

    monkeypatch.setattr(Collection, "get", fail)
    error = await town.error(500, "POST", PATH, {"question": QUESTION})
    assert error["code"] == "store_error"
    assert "secret" not in error["message"]
    assert "unable to open /srv/secret/index" in caplog.text


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"question": " "}, "question"),
        ({"question": None}, "question"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 101}, "top_k"),
        ({"top_k": "4"}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"method": "no-such-method"}, "method"),
        ({"eviction": "no-such-rule"}, "eviction"),
        ({"temperature": 1.0}, "temperature"),
        ({"collection": 3}, "collection"),
    ],
)
async def test_bodies_that_are_refused(town: Town, more: dict[str, Any], param: str) -> None:
    error = await town.error(400, "POST", PATH, {"question": QUESTION, **more})
    assert error["param"] == param


async def test_a_collection_that_remembers_an_embedding(tmp_path: Path) -> None:
    with embedding_server() as endpoint:
        name = EmbeddingName.given("tiny", endpoint.url)
        database, embedding = Database(tmp_path / "chroma"), LearnedEmbedding(name)
        engine = Engine(builtin(), ChunkStore(tmp_path / "kv"))
        link = ChromaLink(open_remembering(database, "town", embedding), engine, embedding)
        texts = [*TEXTS[:3], "The museum shows maps."]
        ids = [str(number) for number in range(len(texts))]
        link.add(ids, texts, link.vectors(ids, texts))
        served = Town(tmp_path, collections=["town"], method="reuse")
        body = {"question": "Which gallery?", "top_k": 2, "max_tokens": 4}
        found = await served.json("POST", PATH, body)
        assert found["sources"][0]["text"] == texts[-1]
        tenant = Tenant(collections=("town",))
        same = [served.tenancy.link(tenant, "town").embedding for _ in range(2)]
        assert same[0] is same[1] is not None  # loaded once
    error = await served.error(502, "POST", PATH, body)
    assert error["code"] == "embedding_failed" and error["type"] == "server_error"
    assert endpoint.url not in error["message"] and "log has the cause" in error["message"]


async def test_the_event_loop_is_free_while_a_collection_is_searched(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()

    search = ChromaLink.search

    def slow(link: ChromaLink, question: str, k: int) -> list[Retrieved]:
        health = asyncio.run_coroutine_threadsafe(town.send("GET", "/health"), loop)
        assert health.result(60).status_code == 200
        loop.call_soon_threadsafe(answered.set)
        return search(link, question, k)

    monkeypatch.setattr(ChromaLink, "search", slow)
    assert (await town.json("POST", PATH, {"question": QUESTION}))["answer"]
    assert answered.is_set()

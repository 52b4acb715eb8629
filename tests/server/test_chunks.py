"""Chunks over HTTP: cached, counted and deleted, each tenant's apart from all others'."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import Engine
from samkv_integrations.server import chunks as routes
from tests.support.records import TEXTS, builtin
from tests.support.served_town import BLUE, KEYS, RED, Town

PATH = "/v1/samkv/chunks"


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


async def test_texts_are_cached_once(town: Town) -> None:
    body = {"texts": [TEXTS[0], f"\n {TEXTS[1]} ", TEXTS[0]]}
    first = (await town.json("POST", PATH, body))["data"]
    assert [one["was_cached"] for one in first] == [False, False, False]
    engine = town.engine()
    assert [one["key"] for one in first] == [engine.key_of(text) for text in body["texts"]]
    assert [one["tokens"] for one in first] == [
        len(engine.model.tokenize(text.strip(), special=False)) for text in body["texts"]
    ]
    files = {file.stem: file.stat().st_size for file in town.folder.rglob("*.safetensors")}
    assert {one["key"]: one["bytes"] for one in first} == files
    again = (await town.json("POST", PATH, body))["data"]
    assert again == [{**one, "was_cached": True} for one in first]


async def test_what_is_deleted_is_gone(town: Town) -> None:
    await town.json("POST", PATH, {"texts": TEXTS})
    assert await town.json("DELETE", PATH, {"texts": [TEXTS[0], "never seen"]}) == {"deleted": 1}
    assert (await town.json("GET", PATH))["chunks"] == len(TEXTS) - 1
    assert await town.json("DELETE", PATH, {"texts": [TEXTS[0]]}) == {"deleted": 0}
    again = await town.json("POST", PATH, {"texts": TEXTS[:2]})
    assert [one["was_cached"] for one in again["data"]] == [False, True]


@pytest.mark.parametrize(
    ("text", "why"),
    [(" ", "holds no text"), ("long " * 5000, "context window"), ("half a \ud83d", "surrogate")],
)
async def test_a_text_that_cannot_be_cached_is_named(town: Town, text: str, why: str) -> None:
    error = await town.error(400, "POST", PATH, {"texts": [TEXTS[0], text, TEXTS[1]]})
    assert error["param"] == "texts[1]" and why in error["message"]
    assert error["message"].endswith("; no text was cached")
    assert (await town.json("GET", PATH))["chunks"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["x"] * (routes.MAX_TEXTS + 1)}, "texts"),
        ({"texts": "a text"}, "texts"),
        ({"texts": ["a", 1]}, "texts[1]"),
        ({"texts": ["a"], "text": "b"}, "text"),
        ({}, "texts"),
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_bodies_that_are_refused(
    town: Town, method: str, body: dict[str, Any], param: str
) -> None:
    assert (await town.error(400, method, PATH, body))["param"] == param


async def test_tenants_see_nothing_of_each_other(tmp_path: Path) -> None:
    town = Town(tmp_path, keys=KEYS)
    assert (await town.error(401, "GET", PATH))["code"] == "invalid_api_key"
    red = await town.json("POST", PATH, {"texts": TEXTS[:2]}, key=RED)
    blue = await town.json("POST", PATH, {"texts": TEXTS[:1]}, key=BLUE)
    assert blue["data"][0]["was_cached"] is False
    assert blue["data"][0]["key"] != red["data"][0]["key"]
    assert await town.json("DELETE", PATH, {"texts": TEXTS}, key=BLUE) == {"deleted": 1}
    figures = await town.json("GET", PATH, key=RED)
    assert figures["chunks"] == 2
    assert figures["bytes"] == sum(one["bytes"] for one in red["data"])
    empty = {"object": "samkv.chunks", "chunks": 0, "bytes": 0, "data": []}
    assert await town.json("GET", PATH, key=BLUE) == empty


async def test_figures_name_no_folder_of_this_machine(town: Town) -> None:
    await town.json("POST", PATH, {"texts": TEXTS})
    (row,) = (await town.json("GET", PATH))["data"]
    assert row["model"] == "town-model"
    bits = builtin().default_store_bits
    assert (row["chunks"], row["store_bits"], row["corrupt"]) == (
        len(TEXTS),
        bits,
        0,
    )
    (counted,) = town.engine().store.stats().rows
    assert row["bytes"] == counted.bytes


async def test_other_requests_are_answered_while_chunks_are_cached(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for chunks hold at most `AT_ONCE` threads, however many there are."""
    began, go_on = threading.Semaphore(0), threading.Event()

    def slow(self: Engine, texts: Any) -> int:
        began.release()
        assert go_on.wait(60)
        return 0

    monkeypatch.setattr(Engine, "forget", slow)
    asking = [asyncio.ensure_future(town.send("DELETE", PATH, {"texts": TEXTS})) for _ in range(40)]
    for _ in range(routes.AT_ONCE):
        await asyncio.to_thread(began.acquire)
    assert (await town.json("GET", PATH))["chunks"] == 0
    assert not began.acquire(blocking=False)
    n_refused = 40 - routes.AT_ONCE - routes.MOST_WAITING
    async with asyncio.timeout(60):  # those that are refused are told so while others wait
        while sum(one.done() for one in asking) < n_refused:
            await asyncio.sleep(0.01)
    go_on.set()
    statuses = [response.status_code for response in await asyncio.gather(*asking)]
    assert sorted(statuses) == [200] * (40 - n_refused) + [429] * n_refused

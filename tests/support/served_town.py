"""A server in the test's own event loop, on the built-in model and a folder of collections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from tests.support.records import TEXTS, builtin

RED, BLUE = "sk-of-the-red-team", "sk-of-the-blue-team"
KEYS = f"{RED} red red-town shared\n{BLUE} blue blue-town"


def fill(folder: Path, collection: str, namespace: str = "", texts: Sequence[str] = TEXTS) -> None:
    """A collection as ``samkv ingest`` leaves it, but for the sources, which are short."""
    engine = Engine(builtin(), ChunkStore(folder / "kv", namespace=namespace))
    opened = open_collection(folder / "chroma", collection, create=True)
    ChromaLink(opened, engine).add(
        [f"{collection}-{n}" for n in range(len(texts))],
        texts,
        HashingEmbedding().embed(texts),
        [{"source": f"{n}.txt"} for n in range(len(texts))],
    )


class Town:
    """An application, and what stands behind it. keys: as in a file of keys."""

    def __init__(
        self, folder: Path, *, keys: str = "", collections: Sequence[str] = (), **options: Any
    ) -> None:
        self.folder = folder
        self.tenancy = Tenancy(Scheduler(builtin(), turns=FairTurns), folder, **options)
        self.keys = ApiKeys(keys, Tenant(collections=tuple(collections)))
        settings = Settings(model_name="town-model", most_tokens=16, max_body_bytes=1_000_000)
        self.asgi = create_app(self.tenancy, self.keys, settings)

    def engine(self, namespace: str = "") -> Engine:
        return self.tenancy.engine(Tenant(namespace=namespace))

    async def send(
        self, method: str, path: str, body: object = None, key: str = ""
    ) -> httpx.Response:
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        content = None if body is None else json.dumps(body)  # escaped, so half characters can go
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.asgi), base_url="http://localhost", headers=headers
        ) as client:
            return await client.request(method, path, content=content)

    async def json(self, *request: Any, status: int = 200, **more: Any) -> dict[str, Any]:
        """The body of a response that has a status."""
        response = await self.send(*request, **more)
        assert response.status_code == status, response.text
        found: dict[str, Any] = response.json()
        return found

    async def error(self, status: int, *request: Any, **more: Any) -> dict[str, Any]:
        found = await self.json(*request, status=status, **more)
        error: dict[str, Any] = found["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


def events_of(response: httpx.Response) -> list[Any]:
    """The data of the events of a stream; the last one is no JSON."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [block.removeprefix("data: ") for block in response.text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]

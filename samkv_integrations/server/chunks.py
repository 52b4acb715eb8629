"""``/v1/samkv/chunks``: cache, count and delete texts over HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidChunk, InvalidOption, Overloaded
from samkv_integrations.server.bodies import Body
from samkv_integrations.server.service import BoundedRoute, Service
from samkv_integrations.server.tenancy import Tenant
from samkv_integrations.serving.stream import off_loop
from samkv_integrations.store.chunk import FORMAT_VERSION, ChunkRef

MAX_TEXTS = 1024
"""Most texts of one request."""

AT_ONCE, MOST_WAITING = 2, 32
"""Requests of one key that cache or delete at the same time, and requests that wait their turn."""

_Made = TypeVar("_Made")


class Texts(Body):
    """The texts of chunks. White space around them is ignored."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"texts": ["The ferry takes twelve minutes."]}]}
    )

    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class CachedChunk(BaseModel):
    """A text that has a cache now.

    bytes: size of the file. was_cached: whether a valid cache existed before the request.
    """

    key: str
    tokens: int
    bytes: int
    was_cached: bool


class CachedChunks(BaseModel):
    """The texts of a request, in the same order."""

    object: Literal["list"] = "list"
    data: list[CachedChunk]


class Deleted(BaseModel):
    """deleted: number of deleted chunks, of all models."""

    deleted: int


class ChunkFigures(BaseModel):
    """The caches of one model and format, see `FingerprintStats`."""

    model: str
    dtype: str
    store_bits: int
    block_size: int
    chunks: int
    bytes: int
    hits: int
    misses: int
    evicted: int
    corrupt: int


class StoreFigures(BaseModel):
    """The caches of the caller's namespace, in total and by model."""

    object: Literal["samkv.chunks"] = "samkv.chunks"
    chunks: int
    bytes: int
    data: list[ChunkFigures]


def router(service: Service) -> APIRouter:
    """The routes of chunks."""
    routes = APIRouter(prefix="/v1/samkv", tags=["chunks"], route_class=BoundedRoute)
    places = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(AT_ONCE))
    n_waiting = Counter[str]()

    async def in_turn(owner: str, work: Callable[[], _Made]) -> _Made:
        """The result of ``work`` in a thread. The work continues even if the client disconnects."""
        if places[owner].locked() and n_waiting[owner] >= MOST_WAITING:
            raise Overloaded(
                f"{MOST_WAITING} requests wait already to cache or delete chunks; ask again later"
            )
        n_waiting[owner] += 1
        try:
            await places[owner].acquire()
        finally:
            n_waiting[owner] -= 1
        try:
            return await off_loop(work, owner=owner)
        finally:
            places[owner].release()

    @routes.post("/chunks")
    async def cache(body: Texts, request: Request) -> CachedChunks:
        """Cache texts, so that prompts reuse their KV entries.

        Valid caches stay as they are. A text that cannot be cached is an error, and no text of the
        request is cached.
        """
        tenant: Tenant = request.state.tenant
        engine = await service.engine(tenant)
        work = partial(_cache, service, engine, body.texts, tenant.owner)
        return CachedChunks(data=await in_turn(tenant.owner, work))

    @routes.delete("/chunks")
    async def delete(body: Texts, request: Request) -> Deleted:
        """Delete all stored data of texts, for all models.

        Records of collections stay: a question that retrieves such a text caches it again.
        """
        tenant: Tenant = request.state.tenant
        engine = await service.engine(tenant)
        work = partial(engine.forget, body.texts)
        return Deleted(deleted=await in_turn(tenant.owner, work))

    @routes.get("/chunks")
    async def stats(request: Request) -> StoreFigures:
        """The caches of the key's namespace."""
        tenant: Tenant = request.state.tenant
        engine, model_name = await service.engine(tenant), service.settings.model_name
        return await off_loop(_figures, engine, model_name, owner=tenant.owner)

    return routes


def _cache(service: Service, engine: Engine, texts: Sequence[str], owner: str) -> list[CachedChunk]:
    """Cache the texts. Raises Failure for the first text that cannot be cached."""
    chunks, refs = engine.chunks, list[ChunkRef]()
    for place, text in enumerate(texts):
        try:
            refs += chunks.refer([text], must_fit=True)
        except (InvalidChunk, InvalidOption) as error:
            failure = service.failure(error)
            failure.param = f"texts[{place}]"
            failure.message = f"{failure.param}: {failure.message}; no text was cached"
            raise failure from error
    found = chunks.look_up(chunks.agree(refs))
    chunks.compute(found, owner=owner)
    return [
        CachedChunk(
            key=ref.key, tokens=len(ref.token_ids), bytes=chunks.n_bytes([ref]),
            was_cached=ref.state == "cached",
        )
        for ref in found
    ]  # fmt: skip


def _figures(engine: Engine, model_name: str) -> StoreFigures:
    """The caches of the engine's namespace. Names of models omit their folders."""
    store = engine.store
    rows = [
        ChunkFigures.model_validate(
            asdict(row)
            | {"model": model_name if row.model == engine.model.name else Path(row.model).name}
        )
        for row in store.stats().rows
        # caches of older formats do not name their namespace
        if row.namespace == store.namespace and row.format_version == FORMAT_VERSION
    ]
    return StoreFigures(
        chunks=sum(row.chunks for row in rows), bytes=sum(row.bytes for row in rows), data=rows
    )

"""``/v1/samkv/chunks``: texts are cached, counted and deleted over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from samkv_integrations.cache.chunk import FORMAT_VERSION, ChunkRef
from samkv_integrations.engine.chunks import Chunks
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.off_loop import off_loop
from samkv_integrations.errors import InvalidChunk, InvalidOption, SamkvError, StoreError
from samkv_integrations.server.connection import unless_gone
from samkv_integrations.server.failures import Failure
from samkv_integrations.server.requests import Body
from samkv_integrations.server.service import Service
from samkv_integrations.server.turns import Turns, to_its_end

MAX_TEXTS = 1024
"""Most texts of one request."""

SLICE = 32
"""Texts that are cached in one go. When a client goes away, no further slice is begun."""

AT_ONCE, MOST_WAITING = 2, 32
"""Requests that cache or delete at a time, and that wait for it."""


class Texts(Body):
    """The texts of chunks, each read to the letter but for white space around it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"texts": ["The ferry takes twelve minutes."]}]}
    )

    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class CachedChunk(BaseModel):
    """One text that has a cache now.

    bytes: of its file. was_cached: whether it had a sound cache before the request.
    """

    key: str
    tokens: int
    bytes: int
    was_cached: bool


class CachedChunks(BaseModel):
    """The texts of a request, in its order."""

    object: Literal["list"] = "list"
    data: list[CachedChunk]


class Deleted(BaseModel):
    """deleted: chunks that there were, of whichever model."""

    deleted: int


class ChunkFigures(BaseModel):
    """The caches that one model and format have. See `FingerprintStats`."""

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
    """What the caller's namespace holds, in all and by model."""

    object: Literal["samkv.chunks"] = "samkv.chunks"
    chunks: int
    bytes: int
    data: list[ChunkFigures]


def router(service: Service) -> APIRouter:
    """The routes of chunks."""
    routes = APIRouter(prefix="/v1/samkv", tags=["chunks"])
    turns = Turns(AT_ONCE, MOST_WAITING)

    @routes.post("/chunks")
    async def cache(body: Texts, request: Request) -> CachedChunks:
        """Cache texts, so that prompts which hold them are answered from their caches.

        What is cached and sound is left alone. A text that cannot be cached is an error, and does
        not keep the others from being cached: ``data`` of the error's body has an entry for each
        text, with ``error`` in those that have no cache.
        """
        engine = await service.engine(request.state.tenant)
        outcomes = await unless_gone(request, _cached(turns, engine, body.texts))
        _require_all(outcomes)
        return CachedChunks(data=[each.chunk for each in outcomes if each.chunk])

    @routes.delete("/chunks")
    async def delete(body: Texts, request: Request) -> Deleted:
        """Delete all that is kept of texts, by whichever model.

        Records of collections stay: a question that retrieves such a text caches it again.
        """
        engine = await service.engine(request.state.tenant)

        async def forget() -> int:
            async with turns.turn():
                return await to_its_end(off_loop(engine.forget, body.texts))

        return Deleted(deleted=await unless_gone(request, forget()))

    @routes.get("/chunks")
    async def stats(request: Request) -> StoreFigures:
        """What the namespace of the key holds."""
        engine = await service.engine(request.state.tenant)
        return await off_loop(_figures, engine, service.model_name)

    return routes


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What became of a text: it has a cache, or an error says why not."""

    chunk: CachedChunk | None = None
    error: SamkvError | None = None

    @property
    def shown(self) -> dict[str, object]:
        if self.chunk is not None:
            return self.chunk.model_dump()
        return {"key": None, "error": Failure.of(self.error).message if self.error else None}


async def _cached(turns: Turns, engine: Engine, texts: Sequence[str]) -> list[_Outcome]:
    """What became of each text; none is tried any more after the store has failed."""
    outcomes: list[_Outcome] = []
    async with turns.turn():
        for begin in range(0, len(texts), SLICE):
            part = texts[begin : begin + SLICE]
            outcomes += await to_its_end(off_loop(_cache, engine, part))
            if any(isinstance(each.error, StoreError) for each in outcomes):
                break
    left_out = SamkvError("not tried, as the store had failed before")
    return outcomes + [_Outcome(error=left_out)] * (len(texts) - len(outcomes))


def _cache(engine: Engine, texts: Sequence[str]) -> list[_Outcome]:
    """Cache the texts that can be."""
    chunks = engine.chunks
    refs, failed = _referred(chunks, texts)
    found, places = list(refs.values()), list(refs)
    try:
        found = chunks.look_up(chunks.agree(found))
        uncached = _compute(chunks, found)
    except StoreError as error:
        found = chunks.look_up(found, "exists")
        uncached = {ref.key: error for ref in found if ref.state == "missed"}
    outcomes = {place: _Outcome(error=error) for place, error in failed.items()}
    for place, ref in zip(places, found, strict=True):
        why = uncached.get(ref.key)
        chunk = None if why else _shown(chunks, ref)
        outcomes[place] = _Outcome(chunk=chunk, error=why)
    return [outcomes[place] for place in range(len(texts))]


def _referred(
    chunks: Chunks, texts: Sequence[str]
) -> tuple[dict[int, ChunkRef], dict[int, SamkvError]]:
    """By their places, the texts that can be chunks, and what is wrong with the others."""
    refs: dict[int, ChunkRef] = {}
    failed: dict[int, SamkvError] = {}
    for place, text in enumerate(texts):
        try:
            found = chunks.refer([text])
            chunks.require_fit(found)
            (refs[place],) = found
        except (InvalidChunk, InvalidOption) as error:
            failed[place] = error
    return refs, failed


def _compute(chunks: Chunks, found: Sequence[ChunkRef]) -> dict[str, SamkvError]:
    """Compute what is missed; what cannot be, by key. Raises StoreError like `Chunks.compute`."""
    try:
        chunks.compute(found)
        return {}
    except InvalidChunk:  # one of them: the others are none the worse for it
        failed: dict[str, SamkvError] = {}
    for ref in found:
        try:
            chunks.compute([ref])
        except InvalidChunk as error:
            failed[ref.key] = error
    return failed


def _shown(chunks: Chunks, ref: ChunkRef) -> CachedChunk:
    return CachedChunk(
        key=ref.key, tokens=len(ref.token_ids), bytes=chunks.n_bytes([ref]),
        was_cached=ref.state == "cached",
    )  # fmt: skip


def _require_all(outcomes: Sequence[_Outcome]) -> None:
    """Raises Failure if a text has no cache; its body says which have one."""
    failed = [(place, each.error) for place, each in enumerate(outcomes) if each.error]
    if not failed:
        return
    place, error = failed[0]
    failure = Failure.of(error)
    failure.param = f"texts.{place}"
    n_cached = len(outcomes) - len(failed)
    failure.message = (
        f"texts.{place}: {failure.message}; {n_cached} of {len(outcomes)} texts are cached, and "
        "data says which"
    )
    failure.more = {"data": [each.shown for each in outcomes]}
    raise failure


def _figures(engine: Engine, model_name: str) -> StoreFigures:
    """Figures of the engine's namespace alone; models go by no path of this machine."""
    store = engine.store
    rows = [
        ChunkFigures(
            model=model_name if row.model == engine.model.name else Path(row.model).name,
            dtype=row.dtype, store_bits=row.store_bits, block_size=row.block_size,
            chunks=row.chunks, bytes=row.bytes, hits=row.hits, misses=row.misses,
            evicted=row.evicted, corrupt=row.corrupt,
        )
        for row in store.stats().rows
        # those of older formats do not say whose they are
        if row.namespace == store.namespace and row.format_version == FORMAT_VERSION
    ]  # fmt: skip
    return StoreFigures(
        chunks=sum(row.chunks for row in rows), bytes=sum(row.bytes for row in rows), data=rows
    )

"""``/v1/samkv/ask``: questions about a collection, with retrieval in the server."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from samkv_integrations.chroma.link import nearest
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.off_loop import off_loop
from samkv_integrations.engine.options import AnswerOptions
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import Answer, AnswerStream
from samkv_integrations.errors import InvalidOption, StoreError, UnknownOption
from samkv_integrations.eviction import get_eviction
from samkv_integrations.methods import METHODS, get_method
from samkv_integrations.prompt.template import rag_prompt
from samkv_integrations.server.answers import DONE, figures_of, usage_of
from samkv_integrations.server.connection import EventStream, unless_gone
from samkv_integrations.server.documented import Usage, with_stream
from samkv_integrations.server.failures import Failure
from samkv_integrations.server.keys import Tenant
from samkv_integrations.server.requests import Body
from samkv_integrations.server.service import Service

MAX_TOP_K = 100
"""Most chunks that a question retrieves."""

_EVENTS = """Each event's data is an object, the last one `[DONE]`. The first has `sources`, the
next ones `text`, the last but one what else the body has. An error is an object with `error`."""


_NO_COLLECTION = (
    "there is no collection that may be asked here; --collection of 'samkv serve' names some, or "
    "the line of the key in the file of keys"
)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "it is empty; say what to ask")
    return text


def _known(check: Callable[[str], object]) -> AfterValidator:
    """Refuses what ``check`` raises UnknownOption for."""

    def checked(name: str) -> str:
        try:
            check(name)
        except UnknownOption as error:
            raise PydanticCustomError("unknown", "{why}", {"why": str(error)}) from error
        return name

    return AfterValidator(checked)


class Question(Body):
    """``POST /v1/samkv/ask``.

    collection: one that the key may ask; may be left out where there is one. top_k: chunks to
    retrieve. max_tokens: of the answer; None for as many as the server allows, and as fit. method,
    eviction: None for the server's own. chat: whether to ask through the model's chat template.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"question": "How long does the ferry take?", "collection": "notes"}]
        }
    )

    question: Annotated[str, AfterValidator(_not_blank)]
    collection: str | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = 4
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    method: Annotated[str, _known(get_method)] | None = None
    eviction: Annotated[str, _known(get_eviction)] | None = None
    chat: bool = False
    stream: bool = False

    @property
    def options(self) -> AnswerOptions:
        """The options of the answer that were given, but for its length."""
        given = {"method": self.method, "eviction": self.eviction}
        return cast(AnswerOptions, {n: value for n, value in given.items() if value is not None})


class Source(BaseModel):
    """A retrieved chunk. source: what it was taken from. distance: None if it is no number."""

    id: str
    source: str
    text: str
    distance: float | None


class AskedAnswer(BaseModel):
    """An answer, nearest sources first.

    samkv: what it cost. estimated_full_prefill_s: seconds to the first token had the whole prompt
    been computed on an idle server, from the costs of passes: measured here (by ``samkv doctor``),
    or assumed of a machine of today.
    """

    object: Literal["samkv.answer"] = "samkv.answer"
    model: str
    answer: str
    finish_reason: Literal["stop", "length"]
    sources: list[Source]
    usage: Usage
    samkv: Report
    estimated_full_prefill_s: float
    estimated_from: Literal["measured", "assumed"]


class Named(BaseModel):
    """A collection that the key may ask."""

    id: str


class Collections(BaseModel):
    """The collections that the key may ask, in the order in which the server was given them."""

    object: Literal["list"] = "list"
    data: list[Named]


class MethodInfo(BaseModel):
    """A way of answering from chunk caches."""

    id: str
    summary: str
    paper: str


class Methods(BaseModel):
    """What ``method`` may be."""

    object: Literal["list"] = "list"
    data: list[MethodInfo]


def router(service: Service) -> APIRouter:
    """The routes of questions."""
    routes = APIRouter(prefix="/v1/samkv", tags=["questions"])

    @routes.post("/ask", response_model=None, responses=with_stream(AskedAnswer, _EVENTS))
    async def ask(body: Question, request: Request) -> Response:
        """Answer a question from the chunks of a collection that are nearest to it."""
        tenant: Tenant = request.state.tenant
        if not body.stream:
            return JSONResponse(await unless_gone(request, _whole(service, tenant, body)))
        writer, stream = await unless_gone(request, _begun(service, tenant, body))
        return EventStream(service.events(stream, writer, include_usage=True))

    @routes.get("/collections")
    async def collections(request: Request) -> Collections:
        """The collections that may be asked."""
        tenant: Tenant = request.state.tenant
        return Collections(data=[Named(id=name) for name in tenant.collections])

    @routes.get("/methods")
    async def methods() -> Methods:
        """The methods that may be asked with."""
        known = METHODS.values()
        return Methods(
            data=[MethodInfo(id=m.name, summary=m.summary, paper=m.paper) for m in known]
        )

    return routes


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What full prefill would take: an estimate, as far as it was measured how long passes take."""

    of_layer: CostModel
    n_layers: int
    is_measured: bool

    @classmethod
    def of(cls, engine: Engine) -> _Costs:
        model, costs = engine.model, engine.costs
        is_measured = costs != CostModel.assumed(model)
        return cls(of_layer=costs, n_layers=model.n_layers, is_measured=is_measured)

    def shown(self, n_tokens: int) -> dict[str, Any]:
        return {
            "estimated_full_prefill_s": self.of_layer.full_prefill_s(n_tokens) * self.n_layers,
            "estimated_from": "measured" if self.is_measured else "assumed",
        }


@dataclass(frozen=True, kw_only=True)
class _Retrieved:
    """What a question is answered from; and the writer of its answer."""

    engine: Engine
    costs: _Costs
    sources: Sequence[Source]
    model: str

    @property
    def texts(self) -> list[str]:
        return [source.text for source in self.sources]

    @property
    def shown(self) -> list[dict[str, Any]]:
        return [source.model_dump() for source in self.sources]

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer; `AskedAnswer` documents it."""
        text, end = {"answer": answer.text}, self._end(answer.report, answer.finish_reason)
        return {"object": "samkv.answer", **text, "sources": self.shown, **end}

    async def events(self, stream: AnswerStream, *, include_usage: bool) -> AsyncIterator[str]:
        """The data of the events of a stream. Raises what goes wrong in its midst."""
        yield json.dumps({"object": "samkv.answer.sources", "sources": self.shown})
        async for text in stream:
            yield json.dumps({"object": "samkv.answer.text", "text": text})
        end = self._end(stream.report, stream.finish_reason)
        if not include_usage:
            del end["usage"]
        yield json.dumps({"object": "samkv.answer.end", **end})
        yield DONE

    def _end(self, report: Report, finish_reason: str | None) -> dict[str, Any]:
        return {
            "model": self.model,
            "finish_reason": finish_reason,
            "usage": usage_of(report),
            "samkv": figures_of(report, self.model),
            **self.costs.shown(report.prompt_tokens),
        }


async def _begun(
    service: Service, tenant: Tenant, asked: Question
) -> tuple[_Retrieved, AnswerStream]:
    """What was retrieved, and an answer whose first token is there."""
    found = await _retrieved(service, tenant, asked)
    prompt = rag_prompt(asked.question, found.texts, chat=asked.chat)
    stream = await service.begin(
        found.engine, prompt, asked.max_tokens, asked.options, chunks=found.texts
    )
    return found, stream


async def _whole(service: Service, tenant: Tenant, asked: Question) -> dict[str, Any]:
    """The body of a whole answer."""
    found = await _retrieved(service, tenant, asked)
    prompt = rag_prompt(asked.question, found.texts, chat=asked.chat)
    answer = await service.whole(
        found.engine, prompt, asked.max_tokens, asked.options, chunks=found.texts
    )
    return found.body(answer)


async def _retrieved(service: Service, tenant: Tenant, asked: Question) -> _Retrieved:
    """The chunks nearest to a question. Raises Failure if there is no such collection."""
    collection = asked.collection or _only_one(tenant)

    def retrieve() -> _Retrieved:
        link = service.tenancy.link(tenant, collection)
        found = nearest(link, asked.question, asked.top_k)
        sources = [
            Source(
                id=one.id, source=one.source, text=one.text,
                distance=one.distance if math.isfinite(one.distance) else None,
            )
            for one in found
        ]  # fmt: skip
        return _Retrieved(
            engine=link.engine, costs=_Costs.of(link.engine), sources=sources,
            model=service.model_name,
        )  # fmt: skip

    try:
        return await off_loop(retrieve)
    except InvalidOption as error:
        if error.__cause__ is None:
            raise
        raise StoreError(str(error)) from error  # in Chroma's words, which may name folders
    except UnknownOption as error:
        raise Failure(
            status=404, code="collection_not_found", param="collection", message=str(error)
        ) from None


def _only_one(tenant: Tenant) -> str:
    if len(tenant.collections) == 1:
        return tenant.collections[0]
    known = ", ".join(tenant.collections)
    message = f"collection is missing; give one of: {known}" if known else _NO_COLLECTION
    raise Failure(status=400, param="collection", message=message)

"""``/v1/samkv/ask``: questions about a collection; the server retrieves."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from samkv_integrations.engine import Engine
from samkv_integrations.errors import (
    EmbeddingFailed,
    InvalidOption,
    MissingExtra,
    ModelNotFound,
    StoreError,
    UnknownOption,
)
from samkv_integrations.frameworks.local_llm import usage_of
from samkv_integrations.methods import METHODS
from samkv_integrations.options import AnswerOptions
from samkv_integrations.prompt.rag_template import rag_prompt
from samkv_integrations.report import Report
from samkv_integrations.server.bodies import Samkv, Usage, with_stream
from samkv_integrations.server.failures import Failure
from samkv_integrations.server.service import BoundedRoute, Service
from samkv_integrations.server.tenancy import Tenant
from samkv_integrations.serving.stream import Answer, AnswerStream, off_loop

MAX_TOP_K = 100
"""Most chunks that a question retrieves."""

MAX_QUESTION = 100_000
"""Most characters of a question, which is embedded before any other check."""

_EVENTS = """Each event's data is an object; the last event is `[DONE]`. The first object has
`sources`, the next ones `text`, and the last one all other fields of the body. An error is an
object with `error`."""

_NO_COLLECTION = (
    "this key may not ask any collection; who runs the server names collections at its start, in "
    "the key's line or, for keys without a namespace, with --collection"
)


def _asked(text: str) -> str:
    if len(text) > MAX_QUESTION:
        raise PydanticCustomError("long", f"it must have at most {MAX_QUESTION} characters")
    if not text.strip():
        raise PydanticCustomError("blank", "it is empty; say what to ask")
    return text


class Question(Samkv):
    """``POST /v1/samkv/ask``.

    collection: optional if the key may ask only one. top_k: chunks to retrieve. max_tokens: most
    tokens of the answer; None for the server's limit, or less if the context window is smaller.
    chat: whether to use the model's chat template; None for yes if it has one, except for the
    built-in model.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"question": "How long does the ferry take?", "collection": "notes"}]
        }
    )

    question: Annotated[str, AfterValidator(_asked)]
    collection: str | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = 4
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    chat: bool | None = None
    stream: bool = False


class Source(BaseModel):
    """A retrieved chunk. source: its document. distance: see `Retrieved`; None if not finite."""

    id: str
    source: str
    text: str
    distance: float | None


class AskedAnswer(BaseModel):
    """An answer and its sources, nearest first.

    samkv: the report. estimated_from: whether ``samkv doctor`` measured the costs of passes here,
    or the method ``auto`` assumes those of a typical machine. estimated_full_prefill_s: estimated
    seconds to the first token of full prefill on an idle server; None if nothing was measured.
    """

    object: Literal["samkv.answer"] = "samkv.answer"
    model: str
    answer: str
    finish_reason: Literal["stop", "length"]
    sources: list[Source]
    usage: Usage
    samkv: Report
    estimated_full_prefill_s: float | None
    estimated_from: Literal["measured", "assumed"]


def router(service: Service) -> APIRouter:
    """The routes of questions."""
    routes = APIRouter(prefix="/v1/samkv", tags=["questions"], route_class=BoundedRoute)
    model_name = service.settings.model_name

    @routes.post("/ask", response_model=None, responses=with_stream(AskedAnswer, _EVENTS))
    async def ask(body: Question, request: Request) -> Response:
        """Answer a question from the nearest chunks of a collection."""
        tenant: Tenant = request.state.tenant
        collection = body.collection or _only_one(tenant)

        def retrieve() -> tuple[Engine, _Writer]:
            link = service.tenancy.link(tenant, collection)
            sources = [
                {"id": one.id, "source": one.source, "text": one.text,
                 "distance": one.distance if math.isfinite(one.distance) else None}
                for one in link.search(body.question, body.top_k)
            ]  # fmt: skip
            return link.engine, _Writer(model_name, link.engine, sources)

        try:
            engine, writer = await off_loop(retrieve, owner=tenant.owner)
        except InvalidOption as error:
            if error.__cause__ is None:
                raise
            raise StoreError(str(error)) from error  # Chroma's message may name folders
        except (MissingExtra, ModelNotFound) as error:  # of an embedding
            raise EmbeddingFailed(str(error)) from error
        except UnknownOption as error:
            raise Failure(
                404, str(error), code="collection_not_found", param="collection"
            ) from None
        texts = [source["text"] for source in writer.sources]
        in_chat = engine.model.asks_in_chat if body.chat is None else body.chat
        return await service.respond(
            request, engine, rag_prompt(body.question, texts, chat=in_chat),
            cast(AnswerOptions, body.given), writer, chunks=texts,
            most_tokens=body.max_tokens, is_streamed=body.stream,
        )  # fmt: skip

    @routes.get("/collections")
    async def collections(request: Request) -> dict[str, Any]:
        """The collections that the key may ask, in the server's order."""
        tenant: Tenant = request.state.tenant
        return {"object": "list", "data": [{"id": name} for name in tenant.collections]}

    @routes.get("/methods")
    async def methods() -> dict[str, Any]:
        """The values of ``method``."""
        known = METHODS.values()
        shown = [{"id": each.name, "summary": each.summary, "paper": each.paper} for each in known]
        return {"object": "list", "data": shown}

    return routes


class _Writer:
    """Writes one answer in the form of `AskedAnswer`."""

    def __init__(self, model_name: str, engine: Engine, sources: Sequence[dict[str, Any]]) -> None:
        self._model_name, self.sources = model_name, sources
        self._model, self._costs = engine.model, engine.costs

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        found = {"answer": answer.text, "sources": self.sources}
        return {"object": "samkv.answer", **found, **self._end(answer.report, answer.finish_reason)}

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The data of the events of a stream."""
        yield {"object": "samkv.answer.sources", "sources": self.sources}
        async for text in stream:
            yield {"object": "samkv.answer.text", "text": text}
        yield {"object": "samkv.answer.end", **self._end(stream.report, stream.finish_reason)}

    def _end(self, report: Report, finish_reason: str | None) -> dict[str, Any]:
        is_measured = self._costs != self._model.assumed_costs()
        full_s = self._model.n_layers * self._costs.full_prefill_s(report.prompt_tokens)
        return {
            "model": self._model_name,
            "finish_reason": finish_reason,
            "usage": usage_of(report),
            "samkv": report.to_dict() | {"model": self._model_name},
            "estimated_full_prefill_s": full_s if is_measured else None,
            "estimated_from": "measured" if is_measured else "assumed",
        }


def _only_one(tenant: Tenant) -> str:
    if len(tenant.collections) == 1:
        return tenant.collections[0]
    known = ", ".join(tenant.collections)
    message = f"collection is missing; give one of: {known}" if known else _NO_COLLECTION
    raise Failure(400, message, param="collection")

"""``/v1/responses``: OpenAI's newer form of a chat. The server keeps no chat."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import Answer, AnswerStream
from samkv_integrations.llm.local_llm import usage_of
from samkv_integrations.server.bodies import (
    AskedInChat,
    Body,
    Message,
    ResponseFormat,
    SchemaFormat,
    with_stream,
)
from samkv_integrations.server.service import Service

_EVENTS = """The events of OpenAI's API, from `response.created` over `response.output_text.delta`
to `response.completed`, or `response.incomplete` for an answer that was cut; then `[DONE]`. What
the answer cost stands under `samkv` in the last response."""


def _as_messages(given: object) -> object:
    """The input as messages in the form of chat completions."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    messages = []
    for item in given:
        if isinstance(item, dict) and item.get("type") in (None, "message"):
            kept = {name: item[name] for name in item.keys() - {"type", "id", "status", "phase"}}
            if isinstance(parts := kept.get("content"), list):
                kept["content"] = [_as_text_part(part) for part in parts]
            item = kept  # noqa: PLW2901
        messages.append(item)
    return messages


def _as_text_part(part: Any) -> object:  # noqa: ANN401
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {n: part[n] for n in part.keys() - {"annotations", "logprobs"}} | {"type": "text"}
    return part


class TextForm(SchemaFormat):
    """The form of an answer, with the schema beside its name."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    @model_validator(mode="after")
    def _check_schema(self) -> TextForm:
        if ("schema_" in self.model_fields_set) != (self.type == "json_schema"):
            raise PydanticCustomError(
                "schema", "a schema goes with type 'json_schema', which needs one"
            )
        return self


class TextOptions(Body):
    """The form of an answer."""

    format: TextForm = TextForm()


class ResponseRequest(AskedInChat):
    """``POST /v1/responses``.

    input: a user message, or several messages. instructions: a system message before them.
    max_output_tokens: the same as ``max_tokens``. store: accepted, but nothing is stored.
    """

    input: Annotated[
        list[Message],
        Field(min_length=1),
        BeforeValidator(_as_messages, json_schema_input_type=str | list[Message]),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    text: TextOptions = TextOptions()
    store: bool = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    include: Annotated[list[str], Field(max_length=0)] = []
    tool_choice: Literal["none", "auto"] = "none"

    _length: ClassVar[str] = "max_output_tokens"

    @property
    def turns(self) -> list[dict[str, str]]:
        """The turns for a chat template."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*first, *(message.turn for message in self.input)]

    @property
    def form(self) -> ResponseFormat:
        """The form of the answer."""
        return ResponseFormat(type=self.text.format.type, json_schema=self.text.format)


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(BaseModel):
    """The answer."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ResponseBody(BaseModel):
    """An answer. incomplete_details: why it was cut. samkv: its report."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[OutputMessage]
    error: None
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any] | None
    samkv: Report | None = None


def router(service: Service) -> APIRouter:
    """The route of responses."""
    routes = APIRouter(prefix="/v1", tags=["completions"])

    @routes.post("/responses", response_model=None, responses=with_stream(ResponseBody, _EVENTS))
    async def respond(body: ResponseRequest, request: Request) -> Response:
        """Answer a chat, which goes through the model's own chat template. Nothing is stored."""
        service.require_model(body.model)
        engine = await service.engine(request.state.tenant)
        return await service.respond(
            request, engine, body.turns, body.options, _Writer(body),
            most_tokens=body.most_tokens, is_streamed=body.stream,
        )  # fmt: skip

    return routes


class _Writer:
    """Writes one answer."""

    def __init__(self, asked: ResponseRequest) -> None:
        self._item = f"msg_{secrets.token_hex(12)}"
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response",
            "created_at": int(time.time()), "model": asked.model, "error": None,
            "instructions": asked.instructions, "max_output_tokens": asked.most_tokens,
            "metadata": asked.metadata or {}, "parallel_tool_calls": False,
            "previous_response_id": None, "store": False, "temperature": asked.temperature or 0.0,
            "text": asked.text.model_dump(by_alias=True, exclude_unset=True)
            or {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [], "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
        }  # fmt: skip

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        return self._response(answer.text, answer.finish_reason, answer.report)

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The data of the events of a stream."""
        begun = self._head | {
            "status": "in_progress", "output": [], "incomplete_details": None, "usage": None,
        }  # fmt: skip
        part, place = {"type": "output_text", "text": "", "annotations": []}, {"output_index": 0}
        at = place | {"item_id": self._item, "content_index": 0}
        number = 0

        def event(name: str, **data: Any) -> dict[str, Any]:  # noqa: ANN401
            nonlocal number
            number += 1
            return {"type": f"response.{name}", "sequence_number": number - 1, **data}

        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        yield event("output_item.added", item=self._message(None, "in_progress"), **place)
        yield event("content_part.added", part=part, **at)
        text = ""
        async for piece in stream:
            text += piece
            yield event("output_text.delta", delta=piece, logprobs=[], **at)
        done = self._response(text, stream.finish_reason, stream.report)
        (message,) = done["output"]
        yield event("output_text.done", text=text, logprobs=[], **at)
        yield event("content_part.done", part=part | {"text": text}, **at)
        yield event("output_item.done", item=message, **place)
        yield event(done["status"], response=done)

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
        return {
            "type": "message", "id": self._item, "role": "assistant", "status": status,
            "content": content,
        }  # fmt: skip

    def _response(self, text: str, finish_reason: str | None, report: Report) -> dict[str, Any]:
        status = "incomplete" if finish_reason == "length" else "completed"
        usage = usage_of(report)
        return self._head | {
            "status": status,
            "output": [self._message(text, status)],
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            # without the name of the model in this machine, such as a folder
            "samkv": report.to_dict() | {"model": self._head["model"]},
        }

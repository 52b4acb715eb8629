"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/responses``, OpenAI's newer form."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import Answer, AnswerStream
from samkv_integrations.llm.local_llm import usage_of
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.server.bodies import (
    Asked,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ResponseBody,
    ResponseRequest,
    with_stream,
)
from samkv_integrations.server.service import Service, Writer

_CHUNKS = """Chunks of the answer as OpenAI's API has them; the data of the last is `[DONE]`. What
the answer cost stands under `samkv` in the last chunk, with `usage` if that was asked for."""
_EVENTS = """The events of OpenAI's API, from `response.created` over `response.output_text.delta`
to `response.completed`, or `response.incomplete` for an answer that was cut; then `[DONE]`. What
the answer cost stands under `samkv` in the last response."""


def router(service: Service) -> APIRouter:
    """The routes of OpenAI's API that answer."""
    routes = APIRouter(prefix="/v1", tags=["completions"])

    @routes.post(
        "/chat/completions", response_model=None, responses=with_stream(ChatCompletion, _CHUNKS)
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat, which goes through the model's own chat template."""
        turns = [message.turn for message in body.messages]
        return await answered(request, body, turns, _Writer(body))

    @routes.post("/completions", response_model=None, responses=with_stream(Completion, _CHUNKS))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, without a chat template."""
        return await answered(request, body, body.prompt, _Writer(body))

    @routes.post("/responses", response_model=None, responses=with_stream(ResponseBody, _EVENTS))
    async def respond(body: ResponseRequest, request: Request) -> Response:
        """Answer a chat, which goes through the model's own chat template. Nothing is stored."""
        return await answered(request, body, body.turns, _ResponseWriter(body))

    async def answered(request: Request, body: Asked, prompt: Prompt, writer: Writer) -> Response:
        service.require_model(body.model)
        engine = await service.engine(request.state.tenant)
        return await service.respond(
            request, engine, prompt, body.options, writer,
            most_tokens=body.most_tokens, is_streamed=body.stream,
        )  # fmt: skip

    return routes


class _Writer:
    """Writes one answer in OpenAI's form, as a chat or as a text."""

    def __init__(self, body: Asked) -> None:
        self._is_chat = isinstance(body, ChatRequest)
        self._includes_usage = body.stream_options.include_usage
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            **self._head,
            "choices": [
                _choice(
                    {"message": message} if self._is_chat else {"text": answer.text},
                    answer.finish_reason,
                )
            ],
            "usage": usage_of(answer.report),
            "samkv": answer.report.to_dict() | {"model": self._head["model"]},
        }

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The data of the events of a stream."""
        head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        if self._is_chat:
            first = {"delta": {"role": "assistant", "content": ""}}
            yield {**head, "choices": [_choice(first)]}
        async for text in stream:
            piece = {"delta": {"content": text}} if self._is_chat else {"text": text}
            yield {**head, "choices": [_choice(piece)]}
        end = _choice({"delta": {}} if self._is_chat else {"text": ""}, stream.finish_reason)
        # the report names the model as this machine does, such as by a folder
        cost = {"samkv": stream.report.to_dict() | {"model": head["model"]}}
        if not self._includes_usage:
            yield {**head, "choices": [end], **cost}
            return
        yield {**head, "choices": [end]}
        yield {**head, "choices": [], "usage": usage_of(stream.report), **cost}


def _choice(text: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **text, "logprobs": None, "finish_reason": finish_reason}


class _ResponseWriter:
    """Writes one answer in the form of ``/v1/responses``."""

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
                "output_tokens_details": {"reasoning_tokens": 0}
                | usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            # without the name of the model in this machine, such as a folder
            "samkv": report.to_dict() | {"model": self._head["model"]},
        }

"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/responses``, OpenAI's newer form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response

from samkv_integrations.errors import SamkvError
from samkv_integrations.frameworks.local_llm import usage_of
from samkv_integrations.frameworks.tool_calls import ShownText, ToolCall, ToolUse, with_tools
from samkv_integrations.options import AnswerOptions
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.report import Report
from samkv_integrations.server.bodies import (
    Asked,
    AskedInChat,
    ChatRequest,
    CompletionRequest,
    OpenAIAnswer,
    ResponseRequest,
    with_stream,
)
from samkv_integrations.server.leniency import LenientRoute
from samkv_integrations.server.service import BoundedRoute, Service, Writer
from samkv_integrations.serving.stream import Answer, AnswerStream, off_loop

_CHUNKS = """Chunks of the answer, as in OpenAI's API; the data of the last event is `[DONE]`. The
last chunk has the report under `samkv`, and `usage` if the request asks for it."""
_EVENTS = """The events of OpenAI's API, from `response.created` over `response.output_text.delta`
to `response.completed`, or `response.incomplete` for an answer that was cut; then `[DONE]`. The
last response has the report under `samkv`."""


def router(service: Service) -> APIRouter:
    """The routes of OpenAI's API that answer."""
    route = LenientRoute if service.settings.is_lenient else BoundedRoute
    routes = APIRouter(prefix="/v1", tags=["completions"], route_class=route)

    chunked = with_stream(OpenAIAnswer, _CHUNKS)

    @routes.post("/chat/completions", response_model=None, responses=chunked)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat, which goes through the model's own chat template."""
        turns = [message.turn for message in body.messages]
        return await answered(request, body, turns, _Writer)

    @routes.post("/completions", response_model=None, responses=chunked)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, without a chat template."""
        return await answered(request, body, body.prompt, _Writer)

    @routes.post("/responses", response_model=None, responses=with_stream(OpenAIAnswer, _EVENTS))
    async def respond(body: ResponseRequest, request: Request) -> Response:
        """Answer a chat, which goes through the model's own chat template. Nothing is stored."""
        return await answered(request, body, body.turns, _ResponseWriter)

    async def answered(
        request: Request, body: Asked, prompt: Prompt,
        writer: Callable[[Any, ToolUse | None], Writer],
    ) -> Response:  # fmt: skip
        service.require_model(body.model)
        engine = await service.engine(request.state.tenant)
        try:
            options, use = body.options, None
            if "tools" in options:
                prompt, use = await off_loop(
                    with_tools, engine.model, prompt, options, owner=request.state.tenant.owner
                )
            return await service.respond(
                request, engine, prompt, cast(AnswerOptions, options), writer(body, use),
                most_tokens=body.most_tokens, is_streamed=body.stream,
            )  # fmt: skip
        except SamkvError as error:
            raise service.failure(error, body.paths) from error

    return routes


class _Parts:
    """The text and the calls of one answer. calls: complete once the text is complete."""

    def __init__(self, body: Asked, use: ToolUse | None) -> None:
        self._shown, self._is_forced = ShownText(use), use is not None and bool(use.forced)
        is_parallel = not isinstance(body, AskedInChat) or body.parallel_tool_calls
        self._most_calls = None if is_parallel else 1
        self.calls: tuple[ToolCall, ...] = ()

    def of(self, answer: Answer) -> str:
        """The text of a whole answer."""
        return self._shown.push(answer.text) + self._rest()

    async def pieces(self, stream: AnswerStream) -> AsyncIterator[str]:
        """The text of a stream."""
        async for delta in stream:
            if text := self._shown.push(delta):
                yield text
        if text := self._rest():
            yield text

    def _rest(self) -> str:
        _, found = self._shown.rest()
        self.calls = found.calls[: self._most_calls]
        if self._is_forced:  # a call that was cut at max_tokens is not shown as text
            return ""
        return found.full_text[len(self._shown.text) :]


class _Writer:
    """Writes one answer in OpenAI's form, as a chat or as a text."""

    def __init__(self, body: Asked, use: ToolUse | None) -> None:
        self._parts = _Parts(body, use)
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
        text = self._parts.of(answer)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._parts.calls:
            message |= {"content": text or None, "tool_calls": self._calls()}
        choice = {"message": message} if self._is_chat else {"text": text}
        return {
            **self._head,
            "choices": [_choice(choice, self._reason(answer.finish_reason))],
            "usage": usage_of(answer.report),
            "samkv": answer.report.to_dict() | {"model": self._head["model"]},
        }

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The data of the events of a stream."""
        head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

        def chunk(choice: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
            return {**head, "choices": [_choice(choice, reason)], **more}

        if self._is_chat:
            yield chunk({"delta": {"role": "assistant", "content": ""}})
        async for text in self._parts.pieces(stream):
            yield chunk({"delta": {"content": text}} if self._is_chat else {"text": text})
        for number, call in enumerate(self._calls()):
            yield chunk({"delta": {"tool_calls": [{"index": number} | call]}})
        last: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        reason = self._reason(stream.finish_reason)
        # the report has this machine's name of the model, such as a folder
        cost = {"samkv": stream.report.to_dict() | {"model": head["model"]}}
        if self._includes_usage:
            yield chunk(last, reason)
            yield {**head, "choices": [], "usage": usage_of(stream.report), **cost}
        else:
            yield chunk(last, reason, **cost)

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in self._parts.calls
        ]  # fmt: skip

    def _reason(self, finish_reason: str | None) -> str | None:
        return "tool_calls" if self._parts.calls and finish_reason == "stop" else finish_reason


def _choice(text: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **text, "logprobs": None, "finish_reason": finish_reason}


class _ResponseWriter:
    """Writes one answer in the form of ``/v1/responses``."""

    def __init__(self, asked: ResponseRequest, use: ToolUse | None) -> None:
        self._parts = _Parts(asked, use)
        self._item = f"msg_{secrets.token_hex(12)}"
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response",
            "created_at": int(time.time()), "model": asked.model, "error": None,
            "instructions": asked.instructions, "max_output_tokens": asked.most_tokens,
            "metadata": asked.metadata or {}, "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None, "store": False, "temperature": asked.temperature or 0.0,
            "text": asked.text.model_dump(by_alias=True, exclude_unset=True)
            or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice,
            "tools": [
                {"type": "function", "parameters": {}, "strict": each.strict}
                | each.tool["function"]
                for each in asked.tools
            ],
            "top_p": 1.0 if asked.top_p is None else asked.top_p, "truncation": "disabled",
        }  # fmt: skip

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        text = self._parts.of(answer)
        return self._response(text, answer.finish_reason, answer.report)

    async def events(self, stream: AnswerStream) -> AsyncIterator[dict[str, Any]]:
        """The data of the events of a stream."""
        begun = self._head | {
            "status": "in_progress", "output": [], "incomplete_details": None, "usage": None,
        }  # fmt: skip
        part, place = {"type": "output_text", "text": "", "annotations": []}, {"output_index": 0}
        at = place | {"item_id": self._item, "content_index": 0}
        numbers = count()

        def event(name: str, /, **data: Any) -> dict[str, Any]:
            return {"type": f"response.{name}", "sequence_number": next(numbers), **data}

        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        text = ""
        opening: list[tuple[str, dict[str, Any]]] = [
            ("output_item.added", place | {"item": self._message(None, "in_progress")}),
            ("content_part.added", at | {"part": part}),
        ]
        async for piece in self._parts.pieces(stream):
            for name, data in opening:
                yield event(name, **data)
            opening = []
            text += piece
            yield event("output_text.delta", delta=piece, logprobs=[], **at)
        if not self._parts.calls:  # without calls, the answer is an empty text
            for name, data in opening:
                yield event(name, **data)
        done = self._response(text, stream.finish_reason, stream.report)
        for index, item in enumerate(done["output"]):
            place = {"output_index": index}
            if item["type"] == "message":
                yield event("output_text.done", text=text, logprobs=[], **at)
                yield event("content_part.done", part=part | {"text": text}, **at)
            else:
                call, written = place | {"item_id": item["id"]}, item["arguments"]
                begun = item | {"arguments": "", "status": "in_progress"}
                yield event("output_item.added", item=begun, **place)
                yield event("function_call_arguments.delta", delta=written, **call)
                yield event(
                    "function_call_arguments.done", name=item["name"], arguments=written, **call
                )
            yield event("output_item.done", item=item, **place)
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
            "output": [
                *([self._message(text, status)] if text or not self._parts.calls else []),
                *map(_call_item, self._parts.calls),
            ],
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
            # not this machine's name of the model, such as a folder
            "samkv": report.to_dict() | {"model": self._head["model"]},
        }


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name,
        "arguments": json.dumps(call.arguments), "status": "completed",
    }  # fmt: skip

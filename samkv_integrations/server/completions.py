"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from samkv_integrations.engine.stream import Answer, AnswerStream
from samkv_integrations.llm.local_llm import usage_of
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.server.bodies import (
    Asked,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    with_stream,
)
from samkv_integrations.server.service import Service

_EVENTS = """Chunks of the answer as OpenAI's API has them; the data of the last is `[DONE]`. What
the answer cost stands under `samkv` in the last chunk, with `usage` if that was asked for."""


def router(service: Service) -> APIRouter:
    """The routes of completions."""
    routes = APIRouter(prefix="/v1", tags=["completions"])

    @routes.post(
        "/chat/completions", response_model=None, responses=with_stream(ChatCompletion, _EVENTS)
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat, which goes through the model's own chat template."""
        return await answered(request, body, [message.turn for message in body.messages])

    @routes.post("/completions", response_model=None, responses=with_stream(Completion, _EVENTS))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, without a chat template."""
        return await answered(request, body, body.prompt)

    async def answered(request: Request, body: Asked, prompt: Prompt) -> Response:
        service.require_model(body.model)
        engine = await service.engine(request.state.tenant)
        return await service.respond(
            request, engine, prompt, body.options, _Writer(body),
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

"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.server.answers import CHAT, TEXT, Form, Writer
from samkv_integrations.server.connection import EventStream, unless_gone
from samkv_integrations.server.documented import ChatCompletion, Completion, with_stream
from samkv_integrations.server.requests import Asked, ChatRequest, CompletionRequest
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
        return await _answered(service, request, body, body.turns, CHAT)

    @routes.post("/completions", response_model=None, responses=with_stream(Completion, _EVENTS))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Go on from a prompt, which is read to the letter."""
        return await _answered(service, request, body, body.prompt, TEXT)

    return routes


async def _answered(
    service: Service, request: Request, body: Asked, prompt: Prompt, form: Form
) -> Response:
    """The response to what was asked; a stream's begins once its first token is there."""
    service.require_model(body.model)
    engine = await service.engine(request.state.tenant)
    asked = (engine, prompt, body.most_tokens, body.options)
    writer = Writer(form=form, model=service.model_name)
    if body.stream:
        stream = await unless_gone(request, service.begin(*asked))
        include_usage = body.stream_options.include_usage
        return EventStream(service.events(stream, writer, include_usage=include_usage))
    return JSONResponse(writer.body(await unless_gone(request, service.whole(*asked))))

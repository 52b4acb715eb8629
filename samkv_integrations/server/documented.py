"""The bodies of responses, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from samkv_integrations.engine.report import Report


class Error(BaseModel):
    """What is wrong, in OpenAI's shape. param: the field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not a 2xx."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "message": "unknown collection 'note'; known: notes; did you mean 'notes'?",
                        "type": "invalid_request_error",
                        "param": "collection",
                        "code": "collection_not_found",
                    }
                }
            ]
        }
    )

    error: Error


class PromptDetails(BaseModel):
    """cached_tokens: prompt tokens that were not computed for this answer."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of prompt and answer; chunks count at full length."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AnswerMessage(BaseModel):
    """The answer to a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """The only choice."""

    index: Literal[0]
    message: AnswerMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """An answer to a chat. samkv: what it cost, see `Report`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    samkv: Report


class TextChoice(BaseModel):
    """The only choice."""

    index: Literal[0]
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """What goes on from a prompt. samkv: what it cost, see `Report`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    samkv: Report


def with_stream(model: type[BaseModel], events: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with a body, or with events if asked for a stream.

    events: what their data are.
    """
    text = {"type": "string", "description": events}
    return {
        200: {
            "model": model,
            "description": "The answer, or the events of a stream.",
            "content": {"text/event-stream": {"schema": text}},
        }
    }


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "A field is wrong, unknown or missing, or the prompt does not fit."),
        (401, "No API key, or a wrong one."),
        (403, "The Host header names another machine, and the server has no keys."),
        (404, "There is no such model, collection or path."),
        (408, "The body did not arrive in time."),
        (413, "The body is too large."),
        (429, "Too many requests wait; Retry-After says when to ask again."),
        (500, "The server failed, or its folder cannot be used."),
        (503, "The server ends."),
        (504, "The answer was not complete in time."),
        ("default", "Any other error."),
    )
}
"""The errors of all routes that need a key, where there are keys."""

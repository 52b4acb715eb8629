"""Between LlamaIndex's messages, keyword arguments and responses, and what the engine takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
)

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model import Sampling
from samkv_integrations.report import Report

GENERATE_KWARGS = ("temperature", "top_p", "seed", "stop")
CALL_KWARGS = (*GENERATE_KWARGS, "max_tokens", "max_new_tokens")

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
_Piece = TypeVar("_Piece")


def with_system_prompt(
    messages: Sequence[ChatMessage], system_prompt: str | None
) -> list[ChatMessage]:
    """The messages, beginning with ``system_prompt``; some of LlamaIndex has put it there."""
    first = messages[0] if messages else None
    if not system_prompt or (
        first is not None
        and _ROLES.get(first.role) == "system"
        and (first.content or "").startswith(system_prompt)
    ):
        return list(messages)
    return [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt), *messages]


def to_turns(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages for a chat template. Neighbours of one role become one: most templates want turns.

    Raises InvalidOption for what a model that reads text cannot be told.
    """
    turns: list[dict[str, str]] = []
    for message in messages:
        role = _ROLES.get(message.role)
        if role is None:
            known = ", ".join(sorted(role.value for role in _ROLES))
            raise InvalidOption(
                f"role {message.role.value!r} of a message is not supported; supported: {known}"
            )
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                raise InvalidOption(
                    f"a message holds a {type(block).__name__}; this model reads text only, "
                    "leave it out"
                )
        content = message.content or ""
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append({"role": role, "content": content})
    return turns


def checked_generate_kwargs(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The options that were given (None is as good as nothing), if all are known and in range."""
    options = _known("option in generate_kwargs", given, GENERATE_KWARGS)
    numbers = {name: value for name, value in options.items() if name != "stop"}
    Sampling(max_new_tokens=max_new_tokens, **numbers)  # raises if one is out of range
    return options


def to_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_new_tokens: int
) -> dict[str, Any]:
    """Keyword arguments of the engine: those of one call, over those of the LLM."""
    options = {**defaults, **_known("option of a call", given, CALL_KWARGS)}
    lengths = [options.pop(name) for name in ("max_tokens", "max_new_tokens") if name in options]
    if len(lengths) > 1:
        raise InvalidOption("max_tokens and max_new_tokens are the same thing; give one")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return {**options, "max_new_tokens": lengths[0] if lengths else max_new_tokens}


def _known(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    for name in given:
        if name not in known:
            raise UnknownOption.among(kind, name, known)
    return {name: value for name, value in given.items() if value is not None}


def to_completion(text: str, report: Report, delta: str | None = None) -> CompletionResponse:
    """A response with token counts where LlamaIndex looks for them, and the report beside."""
    usage = {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
    }
    figures: dict[str, Any] = report.to_dict()
    return CompletionResponse(
        text=text,
        delta=delta,
        raw={"usage": usage, "samkv": figures},
        additional_kwargs={**usage, "samkv": figures},
    )


def to_chat(response: CompletionResponse) -> ChatResponse:
    """The same as an assistant's message.

    Figures stay out of the message, because LlamaIndex writes a message's own kwargs into prompts.
    """
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


async def off_loop(pieces: Iterator[_Piece]) -> AsyncGenerator[_Piece]:
    """Iterate in threads, so that the event loop is free while a piece is computed."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece

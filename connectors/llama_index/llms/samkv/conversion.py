"""Between LlamaIndex's messages, keyword arguments and responses, and what the engine takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
)
from llama_index.core.prompts import PromptTemplate

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model import Sampling
from samkv_integrations.report import Report

GENERATE_KWARGS = (
    "do_sample", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p",
)  # fmt: skip
CALL_KWARGS = (*GENERATE_KWARGS, "max_tokens", "max_new_tokens")

# Options of transformers' generate that are wanted elsewhere, or not at all -> what to do instead.
_INSTEAD = {
    "max_new_tokens": "give max_new_tokens to the LLM, or to a call",
    "max_length": "it would count the prompt as well; give max_new_tokens",
    "eos_token_id": "give stopping_ids to the LLM; the model's own are known",
    "pad_token_id": "one prompt at a time is never padded; leave it out",
}

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
_Piece = TypeVar("_Piece", covariant=True)


def with_system_prompt(
    messages: Sequence[ChatMessage], system_prompt: str | None
) -> list[ChatMessage]:
    """The messages, beginning with ``system_prompt``, which some of LlamaIndex has put there.

    A chat engine that was told the same goes on in the same message, on a line of its own.
    """
    if not system_prompt:
        return list(messages)
    if messages and _ROLES.get(messages[0].role) == "system":
        if f"{messages[0].content}\n".startswith(f"{system_prompt}\n"):
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


def to_wrapper(template: str | PromptTemplate | None) -> PromptTemplate | None:
    """The template around every completion; None if it is ``{query_str}`` alone.

    Raises InvalidOption if the query, and it alone, has no place in it.
    """
    if template is None:
        return None
    wrapper = PromptTemplate(template) if isinstance(template, str) else template
    if not isinstance(wrapper, PromptTemplate) or wrapper.template_vars != ["query_str"]:
        raise InvalidOption(
            f"query_wrapper_prompt={template!r}; it must be a string or PromptTemplate with "
            "{query_str} once, and no other variable"
        )
    return None if wrapper.template == "{query_str}" else wrapper


def checked_generate_kwargs(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The options that were given (None is as good as nothing), if all are known and in range."""
    options = _known("option in generate_kwargs", given, GENERATE_KWARGS)
    sampling = to_options({}, options, max_new_tokens)
    sampling.pop("stop", None)
    Sampling(**sampling)  # raises if one is out of range
    return options


def to_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_new_tokens: int
) -> dict[str, Any]:
    """Keyword arguments of the engine: those of one call, over those of the LLM.

    ``do_sample`` becomes a temperature: without one it is 0 for False and 1 for True.
    """
    own = _known("option of a call", given, CALL_KWARGS)
    options = {**defaults, **own}
    if "temperature" in own and "do_sample" not in own:
        options.pop("do_sample", None)  # a call that gives a temperature wants that
    match options.pop("do_sample", None):
        case None:
            pass
        case False:
            options["temperature"] = 0.0
        case True if options.setdefault("temperature", 1.0) == 0:
            raise InvalidOption("do_sample=True and temperature=0 contradict; leave out either")
        case True:
            pass
        case other:
            raise InvalidOption(f"do_sample={other!r}; it must be True or False")
    lengths = [options.pop(name) for name in ("max_tokens", "max_new_tokens") if name in options]
    if len(lengths) > 1:
        raise InvalidOption("max_tokens and max_new_tokens are the same thing; give one")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return {**options, "max_new_tokens": lengths[0] if lengths else max_new_tokens}


def _known(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    for name in given:
        if name in known:
            continue
        if instead := _INSTEAD.get(name):
            raise UnknownOption(f"{name!r} is no {kind}: {instead}")
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


def to_chats(responses: Generator[CompletionResponse]) -> Generator[ChatResponse]:
    """The same for a stream."""
    with closing(responses):
        yield from map(to_chat, responses)


class Pieces(Iterator[_Piece], Protocol[_Piece]):
    """What comes piece by piece, and can be ended before it is exhausted."""

    def close(self) -> None:
        """End it and free what it holds."""
        ...


async def off_loop(pieces: Pieces[_Piece]) -> AsyncGenerator[_Piece]:
    """Iterate in threads, so that the event loop is free while a piece is computed.

    However this ends, ``pieces`` is closed. A task that is cancelled waits for the piece under way,
    which nothing can interrupt; after it nothing is computed any more.
    """
    turn = threading.Lock()

    def step() -> _Piece | None:
        with turn:
            return next(pieces, None)

    def close() -> None:
        with turn:
            pieces.close()

    try:
        while (piece := await asyncio.to_thread(step)) is not None:
            yield piece
    finally:
        await asyncio.shield(asyncio.to_thread(close))

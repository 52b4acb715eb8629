"""Conversion between LlamaIndex's messages and responses, and the engine's prompts and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.prompts import PromptTemplate

from samkv_integrations import Report
from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.local_llm import usage_of
from samkv_integrations.frameworks.tool_calls import (
    ToolAnswer,
    ToolCall,
    arguments_of,
    merged,
    turn_of,
)
from samkv_integrations.prompt.quoting import RenderedPrompt
from samkv_integrations.runtimes.base import Runtime


def with_system_prompt(
    messages: Sequence[ChatMessage], system_prompt: str | None
) -> list[ChatMessage]:
    """The messages with ``system_prompt`` first, unless LlamaIndex has put it there.

    A chat engine with the same system prompt may have added lines to it in the same message.
    """
    if not system_prompt:
        return list(messages)
    if messages and messages[0].role in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
        if f"{messages[0].content}\n".startswith(f"{system_prompt}\n"):
            return list(messages)
    return [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt), *messages]


def rendered(
    messages: Sequence[ChatMessage],
    to_prompt: Callable[[Sequence[ChatMessage]], str],
    model: Runtime,
) -> RenderedPrompt:
    """The prompt that a function of the user makes; messages can inject no control tokens."""

    def render(contents: Sequence[str]) -> str:
        pairs = zip(messages, contents, strict=True)
        return to_prompt(
            [m.model_copy(update={"blocks": [TextBlock(text=text)]}) for m, text in pairs]
        )

    return model.special_tokens.rendered([message.content or "" for message in messages], render)


def to_turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as turns for a chat template; adjacent ones of the same role are joined.

    Raises InvalidOption for a message that is not text.
    """
    return merged(map(_turn, messages))


def _turn(message: ChatMessage) -> dict[str, Any]:
    for block in message.blocks:
        # reasoning of earlier answers is omitted, as chat templates do
        if not isinstance(block, TextBlock | ToolCallBlock | ThinkingBlock):
            raise InvalidOption(
                f"a message holds a {type(block).__name__}; it must hold text only; leave the "
                "block out"
            )
    text = message.content or ""
    calls = (
        ToolCall(block.tool_name, arguments_of(block.tool_kwargs), block.tool_call_id or "")
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    )
    of_tool = message.additional_kwargs
    return turn_of(
        message.role.value, text, calls=calls, call_id=str(of_tool.get("tool_call_id") or ""),
        name=of_tool.get("name"),
    )  # fmt: skip


def to_wrapper(template: str | PromptTemplate | None) -> PromptTemplate | None:
    """The template around every completion; None if it is only ``{query_str}``.

    Raises InvalidOption unless ``{query_str}`` is its only variable.
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


def as_in_repr(text: str) -> str:
    """The text as `repr` writes it inside quotes.

    `simple_summarize` formats a list of texts into its template, which calls `repr`. Both kinds of
    quotes are added first, because `repr` escapes a quote only if a text has both, and ``text`` may
    be a part of such a text.
    """
    return repr(f"{text}'\"")[1:-4]


def to_completion(text: str, report: Report, delta: str | None = None) -> CompletionResponse:
    """A response with the report, and with token counts where LlamaIndex and tracers read them.

    Cached tokens are counted as in OpenAI's API.
    """
    usage = usage_of(report)
    figures: dict[str, Any] = report.to_dict()
    return CompletionResponse(
        text=text,
        delta=delta,
        raw={"usage": usage, "samkv": figures},
        additional_kwargs={**usage, "samkv": figures},
    )


def to_chat(response: CompletionResponse, found: ToolAnswer) -> ChatResponse:
    """The response as an assistant's message. found: its parts.

    The message holds no report, because LlamaIndex writes the kwargs of messages into prompts.
    """
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in found.calls
    ]
    return ChatResponse(
        message=ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=[TextBlock(text=found.full_text), *calls],
            # LlamaIndex's programs look for calls here
            additional_kwargs={"tool_calls": [call.model_dump() for call in calls]}
            if calls
            else {},
        ),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )

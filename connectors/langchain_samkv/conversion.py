"""Between LangChain's messages and metadata, and what the engine takes and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import AnswerStream
from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.tool_calls import ToolCall
from samkv_integrations.frameworks.turns import merged, of_calls, of_result

PROVIDER = "samkv"

_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
          "assistant": "assistant", "ai": "assistant"}  # fmt: skip

_CALL_BLOCKS = ("tool_use", "tool_call", "invalid_tool_call", "function_call")

_REASONING = ("reasoning", "reasoning_content", "thinking", "redacted_thinking")
"""Types of blocks that hold what led to an earlier answer. Chat templates of models that reason
leave it out of later prompts, and so does this one's."""


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages for a chat template, neighbours of one role as one.

    Raises InvalidOption for what a model that reads text cannot be told.
    """
    if not messages:
        raise InvalidOption("the list of messages is empty; give at least one, from the user")
    return merged(map(_turn, messages))


def _turn(message: BaseMessage) -> dict[str, Any]:
    text = _text(message)
    match message:
        case HumanMessage():
            return {"role": "user", "content": text}
        case SystemMessage():
            return {"role": "system", "content": text}
        case AIMessage():
            if message.additional_kwargs.get("function_call"):
                raise InvalidOption(
                    "a message holds a function_call of OpenAI's first interface; give tool_calls"
                )
            # what nobody could read as a call is what the model has written
            written = [text, *(call["args"] or "" for call in message.invalid_tool_calls)]
            calls = (
                ToolCall(call["name"], call["args"], call["id"] or "")
                for call in message.tool_calls
            )
            return of_calls("".join(written), calls)
        case ToolMessage():
            return of_result(text, message.tool_call_id, message.name)
        case ChatMessage():
            if message.role not in _ROLES:
                raise InvalidOption(
                    f"role {message.role!r} of a message is not supported; "
                    f"supported: {', '.join(sorted(_ROLES))}"
                )
            return {"role": _ROLES[message.role], "content": text}
    raise InvalidOption(
        f"a {type(message).__name__} is not supported; put its text into one of those that are: "
        "SystemMessage, HumanMessage, AIMessage, ToolMessage, ChatMessage"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif block.get("type") in _REASONING:
            continue
        elif block.get("type") not in _CALL_BLOCKS:  # they are among tool_calls, too
            raise InvalidOption(
                f"a message holds a block of type {block.get('type')!r}; this model reads text "
                "only, leave it out"
            )
    return "\n".join(texts)  # a chunk that was glued to the next text would not be found


def usage_of(report: Report) -> UsageMetadata:
    """Token counts where LangChain looks for them; chunks count at full length.

    ``cache_read``, a part of ``input_tokens``: those that were not computed for this answer.
    """
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.completion_tokens,
        total_tokens=report.prompt_tokens + report.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=report.cached_tokens),
    )


def metadata_of(stream: AnswerStream) -> dict[str, Any]:
    """What a finished answer's ``generation_info`` and ``response_metadata`` say."""
    report = stream.report
    return {
        "model_name": report.model,
        "model_provider": PROVIDER,
        "finish_reason": stream.finish_reason,
        "samkv": report.to_dict(),
    }


def token_usage(reports: Sequence[Report]) -> dict[str, Any]:
    """The counts of several answers, in the form that ``llm_output`` has of OpenAI's models."""
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    completion_tokens = sum(report.completion_tokens for report in reports)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(report.cached_tokens for report in reports)},
    }

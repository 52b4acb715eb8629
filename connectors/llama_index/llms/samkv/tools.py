"""Calls of tools: LlamaIndex's function calling, where the chat template takes tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

from llama_index.llms.samkv.conversion import arguments_of
from samkv_integrations.errors import InvalidOption

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


class ToolCallingLLM(FunctionCallingLLM):
    """``chat_with_tools``, ``predict_and_call`` and their like.

    ``metadata.is_function_calling_model`` says whether the chat template takes tools and writes
    calls in a form that is read; if it does not, ``predict_and_call`` prompts as for any LLM.

    Raises InvalidOption, without such a template, for tools of a call.
    """

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401  (options of the call)
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        return {
            "messages": messages,
            # a description longer than OpenAI's limit is no problem here
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("any" if tool_required else None),
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResponse:
        """The same, with its first call alone unless several are allowed."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not allow_parallel_tool_calls and len(calls) > 1:
            response.message.blocks = [
                block for block in response.message.blocks if block not in calls[1:]
            ]
        return response

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[ToolSelection]:
        """The calls of an answer; without any an error, or an empty list."""
        found = [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=arguments_of(block.tool_kwargs),
            )
            for block in response.message.blocks
            if isinstance(block, ToolCallBlock)
        ]
        if not found and error_on_no_tool_call:
            raise InvalidOption(
                f"the model called no tool, it answered {response.message.content!r}; use "
                "tool_required=True, or error_on_no_tool_call=False"
            )
        return found

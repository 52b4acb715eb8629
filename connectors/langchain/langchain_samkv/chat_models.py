"""The chat model: LangChain's interface of an `Engine`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from operator import itemgetter
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    BaseMessageChunk,
    ChatMessage,
    ToolMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from langchain_samkv.base import LocalModel
from samkv_integrations import AnswerStream
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.frameworks.tool_calls import (
    ShownText,
    ToolCall,
    ToolUse,
    merged,
    turn_of,
    with_tools,
)

_METHODS = ("json_schema", "json_mode", "function_calling")
_OF_A_TOOL = ("function", "parameters", "input_schema", "inputSchema", "toolSpec")
"""Keys of a tool in a provider's form; a dict without any is a JSON schema."""


class ChatSamKV(LocalModel, BaseChatModel):
    r"""A local chat model that reuses the KV caches of the chunks in its messages.

    Messages go through the model's own chat template. Texts of cached chunks and handles in them
    are loaded from their caches. Everything else is computed as usual.

    Arguments are those of `LocalModel`, and ``streaming``, which LangChain reads: with True
    ``invoke`` streams answers to callbacks, with False nothing streams.

    ``response_metadata["samkv"]`` of a message, ``generation_info["samkv"]`` in a callback, and
    `last_report` hold the report of the answer.

    Instantiate:
        ```python
        from langchain_samkv import ChatSamKV

        model = ChatSamKV(model="builtin", max_tokens=16)  # or a hub id, or a folder
        ```

    Use:
        ```python
        document = "[Tobias Trulman] Tobias Trulman was born in Flevport."
        model.engine.cache_chunks([document])  # SamKVChroma does it for what it is given
        prompt = f"Documents:\n\n{document}\n\nQuestion: Where was Tobias Trulman born?"
        answer = model.invoke(prompt)
        print(answer.text, answer.response_metadata["samkv"]["reused"])
        ```

    Stream:
        ```python
        for chunk in model.stream(prompt):
            print(chunk.text, end="")
        ```

    Async:
        ```python
        answer = await model.ainvoke(prompt)
        async for chunk in model.astream(prompt):
            print(chunk.text, end="")
        ```
    """

    streaming: bool | None = None

    @property
    def _llm_type(self) -> str:
        return "samkv-chat"

    def _attach(self) -> None:
        super()._attach()
        if not self.engine.model.has_chat_template:
            raise InvalidOption(
                f"{self.model_name!r} has no chat template; use SamKV, whose prompts are plain "
                "strings, or give the tokenizer_name of one that has"
            )

    # -- answers --------------------------------------------------------------------------------
    # LangChain tells callbacks of the chunks.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chunks = [chunk async for chunk in self._astream(messages, stop, **kwargs)]
        return generate_from_stream(iter(chunks))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt, use = with_tools(self.engine.model, to_turns(messages), kwargs)
        shown = ShownText(use)
        with closing(self.engine.stream(prompt, **self._options(stop, kwargs))) as answer:
            for delta in answer:
                if text := shown.push(delta):
                    yield ChatGenerationChunk(message=AIMessageChunk(content=text))
            yield self._last_chunk(answer, shown)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        prompt, use = with_tools(self.engine.model, to_turns(messages), kwargs)
        shown = ShownText(use)
        async with await self.engine.astream(prompt, **self._options(stop, kwargs)) as answer:
            async for delta in answer:
                if text := shown.push(delta):
                    yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        yield self._last_chunk(answer, shown)

    def _last_chunk(self, answer: AnswerStream, shown: ShownText) -> ChatGenerationChunk:
        """The remaining text, the tool calls, and the token counts."""
        (rest, found), metadata, report = shown.rest(), self._metadata(answer), answer.report
        calls = [
            tool_call_chunk(name=call.name, args=json.dumps(call.arguments), id=call.id, index=n)
            for n, call in enumerate(found.calls)
        ]
        for text in found.broken:  # LangChain would read an object as the arguments of a call
            is_object = text.lstrip().startswith("{")
            calls.append(tool_call_chunk(args=f"[{text}]" if is_object else text))
        message = AIMessageChunk(
            content=rest,
            tool_call_chunks=calls,
            usage_metadata=UsageMetadata(
                input_tokens=report.prompt_tokens,
                output_tokens=report.completion_tokens,
                total_tokens=report.prompt_tokens + report.completion_tokens,
                input_token_details=InputTokenDetails(cache_read=report.cached_tokens),
            ),
            response_metadata=metadata,
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message, generation_info=metadata)

    # -- tools and objects ----------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools, which its chat template describes to it.

        Calls are in ``tool_calls`` of the answer, or in ``invalid_tool_calls`` if they cannot be
        parsed.

        tool_choice: None or ``auto`` lets the model choose; ``any``, or a tool's name, makes the
            answer one call whose arguments conform to the tool's schema; ``none`` for no tools.
        strict: whether a tool's schema is closed, as for OpenAI's models.

        Raises InvalidOption if the chat template takes no tools, or writes calls in another form.
        """
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        ToolUse.of(self.engine.model, described, None if tool_choice == "none" else tool_choice)
        return self.bind(tools=described, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "json_mode", "function_calling"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers as objects of ``schema``: a pydantic class, a TypedDict, or a JSON schema.

        The prompt does not change: describe the object in it.

        method: ``json_schema`` rules out tokens that violate the schema; ``json_mode`` tokens that
            are not JSON, and allows any object. ``function_calling`` binds the schema as a tool
            that must be called, if the chat template takes tools.
        include_raw: whether to return ``raw``, ``parsed`` and ``parsing_error``, and raise nothing.
        strict: accepted for compatibility; ``json_schema`` is always strict.

        Raises:
            UnknownOption: an argument does not exist.
            InvalidOption: the schema is invalid, or cannot be decided token by token. Raised by the
                first answer.
            MissingExtra: llguidance is not installed. Raised by the first answer.
            OutputParserException: the answer was cut at max_tokens.
        """
        for name in kwargs:
            known = ("schema", "method", "include_raw", "strict")
            raise UnknownOption.among("argument of with_structured_output", name, known)
        InvalidOption.unless_among("method", method, _METHODS)
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw)
        form: dict[str, Any]
        if method == "json_mode":
            form = {"type": "object"}
        elif isinstance(schema, dict) and schema.keys().isdisjoint(_OF_A_TOOL):
            form = schema
        elif isinstance(schema, type) and issubclass(schema, BaseModel):
            form = schema.model_json_schema()  # LangChain's has no references: no recursion
        else:
            form = convert_to_json_schema(schema)
        llm = self.bind(
            json_schema=form,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        parser = _WholeJson()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = _WholeObject(pydantic_object=schema)
        if not include_raw:
            return llm | parser
        read = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | read.with_fallbacks([failed], exception_key="parsing_error")


_CALL_BLOCKS = ("tool_use", "tool_call", "invalid_tool_call", "function_call")

_REASONING = ("reasoning", "reasoning_content", "thinking", "redacted_thinking")
"""Types of blocks with the reasoning of an earlier answer, which chat templates omit too."""


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as turns for a chat template; adjacent ones of the same role are joined.

    Raises InvalidOption for a message that is not text.
    """
    if not messages:
        raise InvalidOption("the list of messages is empty; give at least one, from the user")
    return merged(map(_turn, messages))


def _turn(message: BaseMessage) -> dict[str, Any]:
    if isinstance(message, BaseMessageChunk):  # the sum of a stream
        message = message_chunk_to_message(message)
    texts = []
    blocks = [message.content] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif block.get("type") in _REASONING:
            continue
        elif block.get("type") not in _CALL_BLOCKS:  # call blocks are also in tool_calls
            raise InvalidOption(
                f"a message holds a block of type {block.get('type')!r}; it must be text; leave "
                "the block out"
            )
    text = "\n".join(texts)  # without a line break the tokens of a chunk could merge with others
    if message.additional_kwargs.get("function_call"):
        raise InvalidOption(
            "a message holds a function_call of OpenAI's first interface; give tool_calls"
        )
    role = message.role if isinstance(message, ChatMessage) else message.type
    if isinstance(message, ToolMessage):
        return turn_of(role, text, call_id=message.tool_call_id, name=message.name)
    if not isinstance(message, AIMessage):
        return turn_of(role, text)
    # a call that could not be parsed stays as the model wrote it, see `_last_chunk`
    broken = [call["args"] or "" for call in message.invalid_tool_calls]
    written = [text, *map(_unwrapped, broken)]
    calls = (ToolCall(each["name"], each["args"], each["id"] or "") for each in message.tool_calls)
    return turn_of(role, "".join(written), calls=calls)


def _unwrapped(args: str) -> str:
    """A call that could not be parsed, without the brackets that a stream writes around it."""
    is_wrapped = args.startswith("[") and args.endswith("]") and args[1:].lstrip().startswith("{")
    return args[1:-1] if is_wrapped else args


class _WholeJson(JsonOutputParser):
    """Parses complete JSON only; LangChain's parser closes the brackets of a cut answer.

    Raises OutputParserException for an answer that was cut at max_tokens.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:  # noqa: ANN401
        """The object; with ``partial``, the part of it that the answer has so far."""
        if isinstance(result[0], ChatGeneration):
            metadata = result[0].message.response_metadata
            if metadata.get("finish_reason") == "length":
                raise OutputParserException(
                    f"the answer was cut after {metadata['samkv']['completion_tokens']} tokens, "
                    "before its JSON was complete; give more max_tokens, or a schema with bounds "
                    "(maxLength, maxItems)",
                    llm_output=result[0].text,
                )
        return super().parse_result(result, partial=partial)


class _WholeObject(_WholeJson, PydanticOutputParser[Any]):
    """The same parser, for objects of a pydantic class."""

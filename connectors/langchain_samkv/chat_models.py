"""The chat model: LangChain's interface of an `Engine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from langchain_samkv.base import LocalModel
from langchain_samkv.conversion import metadata_of, to_turns, usage_of
from langchain_samkv.structured import json_schema_of, parsed, parser_of
from langchain_samkv.tools import ShownText, chunks_of, invalid_call_of, tool_call_of
from samkv_integrations.engine.stream import AnswerStream
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.frameworks.tool_calls import ToolAnswer, ToolUse
from samkv_integrations.model.quoting import Chat
from samkv_integrations.prompt.reader import Prompt

_METHODS = ("json_schema", "json_mode", "function_calling")


class ChatSamKV(LocalModel, BaseChatModel):
    r"""A local chat model that answers from the KV caches of the chunks in its messages.

    Messages go through the model's own chat template. Texts of cached chunks in them are answered
    from their caches, and so are handles. Everything else is computed as usual.

    Arguments are those of `LocalModel`, and ``streaming``, which LangChain reads: True has answers
    of ``invoke`` streamed to callbacks, False never streams.

    ``response_metadata["samkv"]`` of a message, ``generation_info["samkv"]`` in a callback, or
    `last_report`, says what the answer cost.

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

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        prompt, use = self._prompt(messages, kwargs)
        answer = self._run(prompt, stop, kwargs)
        return self._result("".join(answer), answer, use)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        prompt, use = self._prompt(messages, kwargs)
        async with await self._arun(prompt, stop, kwargs) as answer:
            text = "".join([delta async for delta in answer])
        return self._result(text, answer, use)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[ChatGenerationChunk]:
        prompt, use = self._prompt(messages, kwargs)
        shown = ShownText(use)
        with closing(self._run(prompt, stop, kwargs)) as answer:
            for delta in answer:
                if text := shown.push(delta):
                    chunk = _chunk(text)
                    if run_manager:
                        run_manager.on_llm_new_token(text, chunk=chunk)
                    yield chunk
            chunk = self._last_chunk(answer, shown)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> AsyncIterator[ChatGenerationChunk]:
        prompt, use = self._prompt(messages, kwargs)
        shown = ShownText(use)
        async with await self._arun(prompt, stop, kwargs) as answer:
            async for delta in answer:
                if text := shown.push(delta):
                    chunk = _chunk(text)
                    if run_manager:
                        await run_manager.on_llm_new_token(text, chunk=chunk)
                    yield chunk
        chunk = self._last_chunk(answer, shown)
        if run_manager:
            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
        yield chunk

    def _prompt(
        self, messages: list[BaseMessage], call: dict[str, Any]
    ) -> tuple[Prompt, ToolUse | None]:
        """What is asked, and with which tools, which are taken out of the options of the call."""
        tools, choice = call.pop("tools", None), call.pop("tool_choice", None)
        turns = to_turns(messages)
        if not tools or choice == "none":
            return turns, None
        use = ToolUse.of(self.engine.model, tools, choice)
        if use.json_schema is not None:
            call["json_schema"] = use.json_schema
        return Chat(turns, use.tools), use

    def _result(self, text: str, answer: AnswerStream, use: ToolUse | None) -> ChatResult:
        self._last_report = report = answer.report
        found, metadata = ToolAnswer(text) if use is None else use.read(text), metadata_of(answer)
        message = AIMessage(
            found.text,
            tool_calls=[tool_call_of(call) for call in found.calls],
            invalid_tool_calls=[invalid_call_of(call) for call in found.broken],
            usage_metadata=usage_of(report),
            response_metadata=metadata,
        )
        generation = ChatGeneration(message=message, generation_info=metadata)
        return ChatResult(generations=[generation])

    def _last_chunk(self, answer: AnswerStream, shown: ShownText) -> ChatGenerationChunk:
        """What was held back, calls of tools included, and the figures, which LangChain adds up."""
        self._last_report = report = answer.report
        (text, found), metadata = shown.rest(), metadata_of(answer)
        message = AIMessageChunk(
            content=text,
            tool_call_chunks=chunks_of(found),
            usage_metadata=usage_of(report),
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
        **kwargs: Any,  # noqa: ANN401  (options of every call, which refuses what it does not know)
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools, which its chat template describes to it.

        Calls are in ``tool_calls`` of the answer, and what cannot be read as one in
        ``invalid_tool_calls``.

        tool_choice: None or ``auto`` lets the model choose; ``any``, or a tool's name, holds the
            answer to one call, its arguments to the tool's schema; ``none`` for no tools.
        strict: as for OpenAI's models, whether a tool's schema is closed.

        Raises InvalidOption if the chat template takes no tools, or has calls written in a form
        that is not read here.
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
        **kwargs: Any,  # noqa: ANN401
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers as objects of ``schema``: a pydantic class, a TypedDict, or a JSON schema.

        The prompt stays as it is, so say in it what is wanted.

        method: ``json_schema`` rules out tokens that would break the schema; ``json_mode`` those
            that would break JSON, and the object may have any form. ``function_calling`` binds the
            schema as a tool that must be called, if the chat template takes tools.
        include_raw: gives ``raw``, ``parsed`` and ``parsing_error`` in place of an error.
        strict: accepted so that arguments of other models fit; ``json_schema`` always is.

        Raises:
            UnknownOption: there is no such argument.
            InvalidOption: the schema is none, or asks for what cannot be decided token by token;
                with the first answer.
            MissingExtra: llguidance is not installed; with the first answer.
            OutputParserException: of an answer that was cut at max_tokens.
        """
        for name in kwargs:
            known = ("schema", "method", "include_raw", "strict")
            raise UnknownOption.among("argument of with_structured_output", name, known)
        if method not in _METHODS:
            raise InvalidOption(f"method={method!r}; allowed: {', '.join(_METHODS)}")
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw)
        llm = self.bind(
            json_schema=json_schema_of(schema) if method == "json_schema" else {"type": "object"},
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        return parsed(llm, parser_of(schema), include_raw=include_raw)


def _chunk(delta: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=delta))

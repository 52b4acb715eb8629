"""The chat model: LangChain's interface of an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, Literal, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import BaseModel

from langchain_samkv.base import LocalModel, TimedAnswer
from langchain_samkv.conversion import metadata_of, to_turns, usage_of
from langchain_samkv.structured import json_schema_of, parsed, parser_of
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.frameworks.off_loop import off_loop

_METHODS = ("json_schema", "json_mode")


class ChatSamKV(LocalModel, BaseChatModel):
    r"""A local chat model that answers from the KV caches of the chunks in its messages.

    Messages go through the model's own chat template. Texts of cached chunks in them are answered
    from their caches, and so are handles. Everything else is computed as usual.

    Arguments are those of `LocalModel`, and ``streaming``, which LangChain reads: True has answers
    of ``invoke`` streamed to callbacks, False never streams.

    ``response_metadata["samkv"]`` of a message, or `last_report`, says what the answer cost.

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
        answer = self._run(to_turns(messages), stop, kwargs)
        return self._result("".join(answer), answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResult:
        answer = await asyncio.to_thread(self._run, to_turns(messages), stop, kwargs)
        # delta by delta, so that no thread goes on with an answer when its task is cancelled
        return self._result("".join([delta async for delta in off_loop(answer)]), answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._run(to_turns(messages), stop, kwargs)) as answer:
            for delta in answer:
                chunk = _chunk(delta)
                if run_manager:
                    run_manager.on_llm_new_token(delta, chunk=chunk)
                yield chunk
            chunk = self._last_chunk(answer)
            if run_manager:
                run_manager.on_llm_new_token("", chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = await asyncio.to_thread(self._run, to_turns(messages), stop, kwargs)
        async with aclosing(off_loop(answer)) as deltas:
            async for delta in deltas:
                chunk = _chunk(delta)
                if run_manager:
                    await run_manager.on_llm_new_token(delta, chunk=chunk)
                yield chunk
        chunk = self._last_chunk(answer)
        if run_manager:
            await run_manager.on_llm_new_token("", chunk=chunk)
        yield chunk

    def _result(self, text: str, answer: TimedAnswer) -> ChatResult:
        self._last_report = report = answer.stream.report
        message = AIMessage(
            text, usage_metadata=usage_of(report), response_metadata=metadata_of(answer.stream)
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last_chunk(self, answer: TimedAnswer) -> ChatGenerationChunk:
        """No new text, but the figures: LangChain adds up what chunks say of them."""
        self._last_report = report = answer.stream.report
        message = AIMessageChunk(
            content="",
            usage_metadata=usage_of(report),
            response_metadata=metadata_of(answer.stream),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    # -- what it does not do --------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        **kwargs: Any,  # noqa: ANN401
    ) -> NoReturn:
        """Refused: a tool would be left out of the prompt, and never called."""
        raise NotImplementedError(
            "ChatSamKV calls no tools; retrieve in the chain, or give the agent another model"
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers as objects of ``schema``: a pydantic class, a TypedDict, or a JSON schema.

        The prompt stays as it is, so say in it what is wanted.

        method: ``json_schema`` rules out tokens that would break the schema; ``json_mode`` those
            that would break JSON, and the object may have any form.
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
        llm = self.bind(
            json_schema=json_schema_of(schema) if method == "json_schema" else {"type": "object"},
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        return parsed(llm, parser_of(schema), include_raw=include_raw)


def _chunk(delta: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=delta))

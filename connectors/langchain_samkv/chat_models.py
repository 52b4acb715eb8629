"""The chat model: LangChain's interface of an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool

from langchain_samkv.base import LocalModel
from langchain_samkv.conversion import metadata_of, to_turns, usage_of
from samkv_integrations.engine.stream import AnswerStream
from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.off_loop import off_loop


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

    def _result(self, text: str, answer: AnswerStream) -> ChatResult:
        self._last_report = report = answer.report
        message = AIMessage(
            text, usage_metadata=usage_of(report), response_metadata=metadata_of(answer)
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last_chunk(self, answer: AnswerStream) -> ChatGenerationChunk:
        """No new text, but the figures: LangChain adds up what chunks say of them."""
        self._last_report = report = answer.report
        message = AIMessageChunk(
            content="",
            usage_metadata=usage_of(report),
            response_metadata=metadata_of(answer),
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
        **kwargs: Any,  # noqa: ANN401
    ) -> NoReturn:
        """Refused: nothing makes this model keep to a schema."""
        raise NotImplementedError(
            "ChatSamKV does not keep to a schema; ask for one in the prompt, and parse the answer "
            "with an output parser"
        )


def _chunk(delta: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=delta))

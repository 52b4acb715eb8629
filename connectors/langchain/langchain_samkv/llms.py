"""The LLM of plain strings, which uses no chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable

from langchain_samkv.base import LocalModel
from samkv_integrations.frameworks.local_llm import usage_of
from samkv_integrations.report import Report


class SamKV(LocalModel, BaseLLM):
    r"""A local model that continues a string, and reuses the KV caches of the chunks in it.

    The prompt is tokenised as it stands, without a chat template; the answer does not repeat it.
    Texts of cached chunks and handles in it are loaded from their caches. Everything else is
    computed as usual.

    Arguments are those of `LocalModel`. ``generation_info`` of a generation, and `last_report`,
    hold the report of the answer.

    Instantiate:
        ```python
        from langchain_samkv import SamKV

        llm = SamKV(model="builtin", max_tokens=16)  # or a hub id, or a folder
        ```

    Use:
        ```python
        document = "[Tobias Trulman] Tobias Trulman was born in Flevport."
        llm.engine.cache_chunks([document])  # SamKVChroma does it for what it is given
        question = "Where was Tobias Trulman born?"
        prompt = f"Documents:\n\n{document}\n\nQuestion: {question}\nAnswer:"
        print(llm.invoke(prompt), llm.last_report)
        ```

    Stream:
        ```python
        for text in llm.stream(prompt):
            print(text, end="")
        ```

    Async:
        ```python
        answer = await llm.ainvoke(prompt)
        async for text in llm.astream(prompt):
            print(text, end="")
        ```
    """

    @property
    def _llm_type(self) -> str:
        return "samkv"

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._result([list(self._stream(prompt, stop, **kwargs)) for prompt in prompts])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._result(
            [[each async for each in self._astream(prompt, stop, **kwargs)] for prompt in prompts]
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with closing(self.engine.stream(prompt, **self._options(stop, kwargs))) as answer:
            for delta in answer:
                chunk = GenerationChunk(text=delta)
                if run_manager:
                    run_manager.on_llm_new_token(delta, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=self._metadata(answer))

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with await self.engine.astream(prompt, **self._options(stop, kwargs)) as answer:
            async for delta in answer:
                chunk = GenerationChunk(text=delta)
                if run_manager:
                    await run_manager.on_llm_new_token(delta, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=self._metadata(answer))

    # With BaseLLM's own, one failed prompt would fail the whole batch.
    batch = Runnable.batch
    abatch = Runnable.abatch

    def _result(self, answers: list[list[GenerationChunk]]) -> LLMResult:
        """The answers as generations, with token counts in the form of OpenAI's models."""
        generations, reports = [], []
        for chunks in answers:
            text, info = "".join(chunk.text for chunk in chunks), chunks[-1].generation_info or {}
            generations.append([Generation(text=text, generation_info=info)])
            reports.append(Report(**info["samkv"]))
        llm_output = {"token_usage": usage_of(*reports), "model_name": self.model_name}
        return LLMResult(generations=generations, llm_output=llm_output)

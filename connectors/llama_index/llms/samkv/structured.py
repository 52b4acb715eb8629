"""Structured predictions: LlamaIndex's, with answers that cannot but keep to the schema."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model, PydanticProgramMode


class StructuredPredictions(CustomLLM):
    """``structured_predict`` and its like, and so ``as_structured_llm``.

    LlamaIndex writes the schema into the prompt, and the answer is held to it token by token. With
    ``pydantic_program_mode`` ``function`` it asks for a call of a tool instead.

    Raises:
        AnswerCut: the answer reached max_new_tokens before it was complete.
        InvalidOption: the schema of the class asks for what cannot be decided token by token.
        MissingExtra: llguidance is not installed.
    """

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,  # noqa: ANN401  (what the template's variables stand for)
    ) -> Model:
        """An object of ``output_cls``; llm_kwargs: options of the call."""
        kwargs = self._with_schema(output_cls, llm_kwargs)
        found: Model = super().structured_predict(output_cls, prompt, kwargs, **prompt_args)
        return found

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,  # noqa: ANN401
    ) -> Model:
        """Like `structured_predict`, off the event loop."""
        kwargs = self._with_schema(output_cls, llm_kwargs)
        found: Model = await super().astructured_predict(output_cls, prompt, kwargs, **prompt_args)
        return found

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,  # noqa: ANN401
    ) -> Generator[Any]:
        kwargs = self._with_schema(output_cls, llm_kwargs)
        return super()._structured_stream_call(output_cls, prompt, kwargs, **prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Any]:
        kwargs = self._with_schema(output_cls, llm_kwargs)
        return await super()._structured_astream_call(output_cls, prompt, kwargs, **prompt_args)

    def _with_schema(
        self, output_cls: type[BaseModel], given: dict[str, Any] | None
    ) -> dict[str, Any]:
        if self.pydantic_program_mode != PydanticProgramMode.LLM:
            return given or {}
        return {"json_schema": output_cls.model_json_schema(), **(given or {})}

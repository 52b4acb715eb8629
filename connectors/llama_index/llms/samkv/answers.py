"""From an answer of the engine to LlamaIndex's responses, whole and delta by delta."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import closing
from typing import Any

from llama_index.core.base.llms.types import CompletionResponse

from llama_index.llms.samkv.conversion import to_completion
from samkv_integrations.engine.stream import AnswerStream
from samkv_integrations.errors import AnswerCut, InvalidOption
from samkv_integrations.frameworks.local_llm import LocalLLM
from samkv_integrations.frameworks.tool_calls import ToolUse
from samkv_integrations.model.quoting import Chat
from samkv_integrations.prompt.reader import Prompt


class AnsweringLLM(LocalLLM):
    """An LLM whose every answer begins with `_run` or `_arun`; ``given``: the options of a call."""

    def _run(self, prompt: Prompt, given: dict[str, Any]) -> AnswerStream:
        raise NotImplementedError

    async def _arun(self, prompt: Prompt, given: dict[str, Any]) -> AnswerStream:
        raise NotImplementedError

    def _asked(self, prompt: Prompt, call: dict[str, Any]) -> tuple[Prompt, ToolUse | None]:
        """What is asked, and with which tools, which are taken out of the options of the call."""
        tools, choice = call.pop("tools", None), call.pop("tool_choice", None)
        if not tools or choice == "none":
            return prompt, None
        use = ToolUse.of(self.engine.model, tools, choice)
        if not isinstance(prompt, list):
            raise InvalidOption(
                "tools with messages_to_prompt; leave it out, for the chat template"
            )
        if use.json_schema is not None:
            call["json_schema"] = use.json_schema
        return Chat(prompt, use.tools), use

    def _whole(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        stream = self._run(prompt, given)
        text = "".join(stream)
        return self._finished(text, stream, given)

    async def _awhole(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        async with await self._arun(prompt, given) as stream:
            text = "".join([delta async for delta in stream])
        return self._finished(text, stream, given)

    def _deltas(
        self, stream: AnswerStream, given: Mapping[str, Any]
    ) -> Generator[CompletionResponse]:
        text = ""
        with closing(stream):
            for delta in stream:
                text += delta
                yield to_completion(text, stream.report, delta)
        yield self._finished(text, stream, given, delta="")

    async def _adeltas(
        self, stream: AnswerStream, given: Mapping[str, Any]
    ) -> AsyncGenerator[CompletionResponse]:
        text = ""
        async with stream:
            async for delta in stream:
                text += delta
                yield to_completion(text, stream.report, delta)
        yield self._finished(text, stream, given, delta="")

    def _finished(
        self,
        text: str,
        stream: AnswerStream,
        given: Mapping[str, Any],
        delta: str | None = None,
    ) -> CompletionResponse:
        self._last_report = stream.report
        if given.get("json_schema") is not None and stream.finish_reason == "length":
            raise AnswerCut(
                f"the answer was cut after {stream.report.completion_tokens} tokens, before its "
                "JSON was complete; give more max_new_tokens, or a schema with bounds (maxLength, "
                "maxItems)"
            )
        return to_completion(text, stream.report, delta)

"""Calls of tools in LangChain's forms, and the text of a stream beside them."""

from __future__ import annotations

import json

from langchain_core.messages import InvalidToolCall
from langchain_core.messages import ToolCall as LangChainToolCall
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk

from samkv_integrations.frameworks.tool_calls import BrokenCall, ToolAnswer, ToolCall, ToolUse


class ShownText:
    """The text of a stream, as soon as it is certain that it is no call of a tool.

    use: the tools of the call; without any, all text is shown at once.
    """

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._text = ""
        self._n_shown = 0

    def push(self, delta: str) -> str:
        """What ``delta`` adds to the text that is shown."""
        if self._use is None:
            return delta
        self._text += delta
        shown = self._use.shown(self._text)
        piece, self._n_shown = shown[self._n_shown :], max(self._n_shown, len(shown))
        return piece

    def rest(self) -> tuple[str, ToolAnswer]:
        """What was held back of the text when no delta follows, and the whole answer apart."""
        if self._use is None:
            return "", ToolAnswer("")
        found = self._use.read(self._text)
        return found.text[self._n_shown :], found


def tool_call_of(call: ToolCall) -> LangChainToolCall:
    """A call in LangChain's form."""
    return LangChainToolCall(name=call.name, args=call.arguments, id=call.id, type="tool_call")


def invalid_call_of(call: BrokenCall) -> InvalidToolCall:
    """What cannot be read as a call, in LangChain's form."""
    return InvalidToolCall(
        name=None, args=call.text, id=None, error=call.reason, type="invalid_tool_call"
    )


def chunks_of(found: ToolAnswer) -> list[ToolCallChunk]:
    """All calls of an answer, in LangChain's form of a stream: one whole chunk each."""
    written = [(call.name, json.dumps(call.arguments), call.id) for call in found.calls]
    broken = [(None, call.text, None) for call in found.broken]
    return [
        tool_call_chunk(name=name, args=args, id=call_id, index=index)
        for index, (name, args, call_id) in enumerate([*written, *broken])
    ]

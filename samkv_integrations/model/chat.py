"""A chat as chat templates take it: messages, and the tools that the model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_USES_TOOLS = re.compile(r"\{[{%][^{}]*\btools\b")


@dataclass(frozen=True)
class Chat:
    """Messages and tools for a chat template.

    messages: ``role`` and ``content``; the assistant's may have ``tool_calls``, each with ``id``,
        ``type`` and ``function`` (``name``, and ``arguments`` as a dict), and what a tool returned
        has the role ``tool``, its ``name`` and ``tool_call_id``.
    tools: as OpenAI describes them: ``type`` and ``function`` (``name``, ``description``,
        ``parameters`` as a JSON schema).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def needs_tools(self) -> bool:
        """Whether it holds what only a template that takes tools can write."""
        return bool(self.tools) or any(
            message["role"] == "tool" or message.get("tool_calls") for message in self.messages
        )


def tool_template(tokenizer: Any) -> str | None:  # noqa: ANN401
    """The chat template for a prompt with tools; None if it would leave them out."""
    if not tokenizer.chat_template:
        return None
    template = str(tokenizer.get_chat_template(tools=[{}]))  # one of several may be for tools
    return template if _USES_TOOLS.search(template) else None

"""Turns of a chat, as a chat template takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samkv_integrations.frameworks.tool_calls import ToolCall


def merged(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns for a chat template. Neighbours of one role become one: most want turns.

    What belongs to a call of a tool stays by itself, because a template pairs calls and results.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        if found and _is_plain(turn) and _is_plain(found[-1]) and found[-1]["role"] == turn["role"]:
            found[-1]["content"] += f"\n\n{turn['content']}"
        else:
            found.append(dict(turn))
    return found


def of_calls(content: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """The assistant's turn with these calls; without any it is a turn like others."""
    written = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    turn = {"role": "assistant", "content": content}
    return {**turn, "tool_calls": written} if written else turn


def of_result(content: str, call_id: str, name: str | None) -> dict[str, Any]:
    """What the tool of a call returned."""
    turn = {"role": "tool", "content": content, "tool_call_id": call_id}
    return {**turn, "name": name} if name else turn


def _is_plain(turn: dict[str, Any]) -> bool:
    return turn.keys() == {"role", "content"}

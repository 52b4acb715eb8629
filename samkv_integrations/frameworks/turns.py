"""Turns of a chat, as a chat template takes them."""

from __future__ import annotations

from collections.abc import Iterable


def merged(turns: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """(role, content) for a chat template. Neighbours of one role become one: most want turns."""
    found: list[dict[str, str]] = []
    for role, content in turns:
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n\n{content}"
        else:
            found.append({"role": role, "content": content})
    return found

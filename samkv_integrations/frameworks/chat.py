"""Turns of a chat, and the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterable

from samkv_integrations.engine.engine import Engine


def merged(turns: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """(role, content) for a chat template. Neighbours of one role become one: most want turns."""
    found: list[dict[str, str]] = []
    for role, content in turns:
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n\n{content}"
        else:
            found.append({"role": role, "content": content})
    return found


def count_tokens(engine: Engine, text: str) -> int:
    """Tokens of a piece of a prompt, handles at the length of their chunks, without BOS.

    Raises HandleError where a handle was cut in two.
    """
    if not text:
        return 0
    return engine.count_tokens(text) - int(engine.model.bos_id is not None)  # the engine's own

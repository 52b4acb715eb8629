"""Texts of chunks in prompts: their bodies, and where words end."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.cache.chunk import normalise
from samkv_integrations.errors import InvalidOption


def is_in_word(text: str, at: int) -> bool:
    """Whether the characters around place ``at`` belong to one word."""
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def bodies_of(texts: Sequence[str]) -> list[str]:
    """The bodies of chunks, see `normalise`. Raises InvalidOption for what are no texts."""
    if isinstance(texts, str):
        raise InvalidOption(f"one text was given for chunks ({texts[:40]!r}); put it into a list")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidOption(f"chunk {text!r} is no text; chunks must be strings")
    return [normalise(text) for text in texts]


def shorten(text: str, limit: int = 60) -> str:
    """At most ``limit`` characters of ``text``, for a message."""
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Prompts that cannot fit the context window, refused before they are tokenised."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from samkv_integrations.errors import PromptTooLong
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.split import Piece

_SHORT = 2**17
"""Characters that are tokenised at once, in some .1 s: the error then says how many tokens."""

_MOST_WRITTEN = 32
"""How many times longer a chunk, in tokens, may be as a prompt writes it: escaped or indented."""


def refuse_far_too_long(model: Model, prompt: str, window: int | None = None) -> None:
    """Raises PromptTooLong for a prompt that is not even worth being searched for chunks."""
    window = min(window or sys.maxsize, model.context_window)
    if len(prompt) <= _SHORT:
        return
    if model.token_bound.at_least(prompt) > _MOST_WRITTEN * window:
        raise PromptTooLong(
            f"prompt of {len(prompt)} characters exceeds the context window of {window} of "
            f"{model.name!r} many times; retrieve fewer chunks"
        )


def refuse_too_long(model: Model, pieces: Sequence[Piece], window: int | None = None) -> None:
    """Raises PromptTooLong if a prompt, cut into pieces, cannot fit, however it is tokenised.

    Others that do not fit are refused when they have been tokenised.
    """
    window = min(window or sys.maxsize, model.context_window)
    texts = Counter(piece.text for piece in pieces)  # a chunk may stand there many times
    if sum(len(text) * times for text, times in texts.items()) <= _SHORT:
        return
    n_tokens = sum(model.token_bound.at_least(text) * times for text, times in texts.items())
    if n_tokens > window:
        raise PromptTooLong(
            f"prompt of at least {n_tokens} tokens (chunks at full size) exceeds the context "
            f"window of {window} of {model.name!r}; retrieve fewer chunks"
        )

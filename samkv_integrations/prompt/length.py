"""Prompts that cannot fit the context window, refused before more is done for them."""

from __future__ import annotations

import sys

from samkv_integrations.errors import PromptTooLong
from samkv_integrations.model.model import Model

_SHORT = 2**17
"""Characters that are tokenised at once, in some .1 s: the error then says how many tokens."""


def refuse_too_long(model: Model, prompt: str, window: int | None = None) -> None:
    """Raises PromptTooLong for a long prompt that cannot fit, however it is tokenised.

    Others that do not fit are refused when they have been tokenised.
    """
    if len(prompt) > _SHORT:
        refuse_tokens(model, model.token_bound.at_least(prompt), window, bound="at least ")


def refuse_tokens(model: Model, n_tokens: int, window: int | None = None, bound: str = "") -> None:
    """Raises PromptTooLong for a prompt of so many tokens, or of more, that cannot fit."""
    window = min(window or sys.maxsize, model.context_window)
    if n_tokens > window:
        raise PromptTooLong(
            f"prompt of {bound}{n_tokens} tokens (chunks at full size) exceeds the context "
            f"window of {window} of {model.name!r}; retrieve fewer chunks"
        )

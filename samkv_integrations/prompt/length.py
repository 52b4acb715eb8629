"""Prompts that cannot fit the context window, refused before they are tokenised."""

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
    window = min(window or sys.maxsize, model.context_window)
    if len(prompt) <= _SHORT:
        return
    n_tokens = model.token_bound.at_least(prompt)
    if n_tokens > window:
        raise PromptTooLong(
            f"prompt of at least {n_tokens} tokens (chunks at full size) exceeds the context "
            f"window of {window} of {model.name!r}; retrieve fewer chunks"
        )

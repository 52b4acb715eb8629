"""The transformers runtime in the table of runtimes: it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from samkv_integrations.errors import MissingExtra
from samkv_integrations.runtimes.base import Runtime, RuntimeKind

_PACKAGES = ("torch", "transformers")


def _load(
    name: str,
    *,
    n_threads: int | None = None,
    tokenizer: Any = None,  # noqa: ANN401
    tokenizer_name: str | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Runtime:
    """See `load_model`. Raises MissingExtra without torch or transformers.

    n_threads: of passes, in this process from now on. tokenizer_name: of its place, if that is not
    the model's.
    """
    MissingExtra.unless_installed("transformers", *_PACKAGES)
    from samkv_integrations.runtimes.transformers.loading import (
        load_model,
        load_tokenizer,
        use_threads,
    )

    if n_threads is not None:
        use_threads(n_threads)
    if tokenizer is None and tokenizer_name is not None:
        tokenizer = load_tokenizer(tokenizer_name, tokenizer_kwargs)
    return load_model(name, tokenizer=tokenizer, tokenizer_kwargs=tokenizer_kwargs, **options)


TRANSFORMERS = RuntimeKind(
    name="transformers",
    load=_load,
    options=(
        "device", "dtype", "model_kwargs", "n_threads", "tokenizer", "tokenizer_kwargs",
        "tokenizer_name",
    ),
    is_installed=lambda: all(find_spec(package) is not None for package in _PACKAGES),
)  # fmt: skip

"""The llama.cpp runtime in the table of runtimes: it imports nothing heavy."""

from __future__ import annotations

from typing import Any

from samkv_integrations.runtimes.base import Runtime, RuntimeKind


def _load(name: str, **options: Any) -> Runtime:
    """See `load_model`. Raises MissingExtra without a package that brings llama.cpp."""
    from samkv_integrations.runtimes.llama_cpp.loading import load_model

    return load_model(name, **options)


LLAMA_CPP = RuntimeKind(name="llama_cpp", load=_load)

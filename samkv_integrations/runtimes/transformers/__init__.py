"""Runs models of transformers: the only room that imports torch and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.runtimes.transformers.loading import load_model, load_tokenizer
    from samkv_integrations.runtimes.transformers.runtime import Model

__all__ = ["Model", "load_model", "load_tokenizer"]


def __getattr__(name: str) -> object:
    """Import a name's module at the name's first use; names of papers' methods need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from samkv_integrations.runtimes.transformers import loading, runtime

    return getattr(runtime if name == "Model" else loading, name)

"""Chunk caches of the records of Chroma collections."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.chroma.client import connect_collection, open_collection
    from samkv_integrations.chroma.link import ChromaLink

__all__ = ["ChromaLink", "connect_collection", "open_collection"]


def __getattr__(name: str) -> object:
    """Import what is asked for first: a wrong folder is told before an engine is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "link" if name == "ChromaLink" else "client"
    return getattr(import_module(f"{__name__}.{home}"), name)

"""Chunk caches of the records of Chroma collections."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.chroma.client import connect_collection, open_collection
    from samkv_integrations.chroma.link import ChromaLink

__all__ = ["ChromaLink", "connect_collection", "open_collection"]


def __getattr__(name: str) -> object:
    """Import what is asked for first: a wrong folder is told before an engine is imported."""
    if name == "ChromaLink":
        from samkv_integrations.chroma.link import ChromaLink

        return ChromaLink
    if name in __all__:
        from samkv_integrations.chroma import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

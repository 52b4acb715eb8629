"""Chunk caches of the records in a Chroma database."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.chroma.client import (
        KEY_FIELD,
        check_name,
        chroma_errors,
        connect_collection,
        open_collection,
    )
    from samkv_integrations.chroma.embedding import HashingEmbedding
    from samkv_integrations.chroma.link import ChromaLink

__all__ = [
    "KEY_FIELD",
    "ChromaLink",
    "HashingEmbedding",
    "check_name",
    "chroma_errors",
    "connect_collection",
    "open_collection",
]

_HOMES = {
    "KEY_FIELD": "client",
    "ChromaLink": "link",
    "HashingEmbedding": "embedding",
    "check_name": "client",
    "chroma_errors": "client",
    "connect_collection": "client",
    "open_collection": "client",
}
"""Public name -> its module."""


def __getattr__(name: str) -> object:
    """Import a name's module at the name's first use, because a link imports the engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

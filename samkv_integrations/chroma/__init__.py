"""Chunk caches of the records of Chroma collections."""

from __future__ import annotations

from samkv_integrations.chroma.client import connect_collection, open_collection
from samkv_integrations.chroma.link import ChromaLink

__all__ = ["ChromaLink", "connect_collection", "open_collection"]

"""Chunk caches of the records in a Chroma database."""

from samkv_integrations.chroma.client import (
    KEY_FIELD,
    check_name,
    chroma_errors,
    connect_collection,
    open_collection,
)
from samkv_integrations.chroma.embedding import Embeddings, HashingEmbedding
from samkv_integrations.chroma.link import ChromaLink

__all__ = [
    "KEY_FIELD",
    "ChromaLink",
    "Embeddings",
    "HashingEmbedding",
    "check_name",
    "chroma_errors",
    "connect_collection",
    "open_collection",
]

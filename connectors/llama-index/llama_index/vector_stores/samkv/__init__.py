"""A Chroma vector store whose nodes have chunk caches."""

from __future__ import annotations

from llama_index.vector_stores.samkv.base import SamKVChromaVectorStore

__all__ = ["SamKVChromaVectorStore"]

"""Chunk caches for LangChain: documents are read once, and prompts answered from what was read."""

from langchain_samkv.documents import (
    SamKVDocumentCompressor,
    SamKVDocumentTransformer,
    format_docs,
)
from langchain_samkv.embeddings import OfflineEmbeddings
from langchain_samkv.vectorstores import SamKVChroma

__all__ = [
    "OfflineEmbeddings",
    "SamKVChroma",
    "SamKVDocumentCompressor",
    "SamKVDocumentTransformer",
    "format_docs",
]

"""Answers from chunk caches in LangChain: models, documents and a vector store."""

from __future__ import annotations

from langchain_samkv.chat_models import ChatSamKV
from langchain_samkv.documents import SamKVDocumentCompressor, SamKVDocumentTransformer, format_docs
from langchain_samkv.llms import SamKV
from langchain_samkv.vectorstores import OfflineEmbeddings, SamKVChroma

__all__ = [
    "ChatSamKV",
    "OfflineEmbeddings",
    "SamKV",
    "SamKVChroma",
    "SamKVDocumentCompressor",
    "SamKVDocumentTransformer",
    "format_docs",
]

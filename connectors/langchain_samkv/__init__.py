"""Answers from chunk caches in LangChain: the chat model, and the LLM of plain strings."""

from __future__ import annotations

from langchain_samkv.chat_models import ChatSamKV
from langchain_samkv.embeddings import OfflineEmbeddings
from langchain_samkv.llms import SamKV

__all__ = ["ChatSamKV", "OfflineEmbeddings", "SamKV"]

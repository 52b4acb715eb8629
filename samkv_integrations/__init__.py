"""Chunk KV caches for RAG on local models: index once, answer from what was read."""

from __future__ import annotations

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.report import Report, Total, collect_reports
from samkv_integrations.engine.stream import Answer, AnswerStream
from samkv_integrations.errors import SamkvError
from samkv_integrations.eviction import EVICTIONS, Eviction
from samkv_integrations.methods import METHODS, Method

__all__ = [
    "EVICTIONS",
    "METHODS",
    "Answer",
    "AnswerStream",
    "ChunkStore",
    "Engine",
    "Eviction",
    "MemoryStore",
    "Method",
    "Report",
    "SamkvError",
    "Total",
    "collect_reports",
]

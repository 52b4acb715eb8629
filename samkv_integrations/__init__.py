"""Chunk KV caches for RAG on local models: index once, answer from what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.cache.disk import ChunkStore
    from samkv_integrations.cache.store import MemoryStore
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


def __getattr__(name: str) -> object:
    """Import what is asked for first: ``samkv --help`` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from samkv_integrations import errors, eviction, methods
    from samkv_integrations.cache import disk, store
    from samkv_integrations.engine import engine, report, stream

    homes = (disk, store, engine, report, stream, errors, eviction, methods)
    return next(getattr(module, name) for module in homes if hasattr(module, name))

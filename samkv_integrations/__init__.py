"""Chunk KV caches for RAG on local models: index once, answer from what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.engine import Engine
    from samkv_integrations.errors import SamkvError
    from samkv_integrations.methods import METHODS, Method
    from samkv_integrations.report import Report, Total, collect_reports
    from samkv_integrations.runtimes.transformers.eviction import EVICTIONS, Eviction
    from samkv_integrations.serving.stream import Answer, AnswerStream
    from samkv_integrations.store.disk import ChunkStore
    from samkv_integrations.store.memory import MemoryStore

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
    from samkv_integrations import engine, errors, methods, report
    from samkv_integrations.runtimes.transformers import eviction
    from samkv_integrations.serving import stream
    from samkv_integrations.store import disk, memory

    homes = (disk, memory, engine, report, stream, errors, eviction, methods)
    return next(getattr(module, name) for module in homes if hasattr(module, name))

"""Chunk KV caches for RAG on local models: index once, answer from what was read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.engine import Engine
    from samkv_integrations.errors import SamkvError
    from samkv_integrations.methods import METHODS, Method
    from samkv_integrations.methods.eviction import EVICTIONS, Eviction
    from samkv_integrations.report import Report, Total
    from samkv_integrations.serving.listeners import AnswerEnded, collect_reports
    from samkv_integrations.serving.stream import Answer, AnswerStream
    from samkv_integrations.store.disk import ChunkStore
    from samkv_integrations.store.memory import MemoryStore

__all__ = [
    "EVICTIONS",
    "METHODS",
    "Answer",
    "AnswerEnded",
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

_HOMES = {
    "EVICTIONS": "methods.eviction",
    "METHODS": "methods",
    "Answer": "serving.stream",
    "AnswerEnded": "serving.listeners",
    "AnswerStream": "serving.stream",
    "ChunkStore": "store.disk",
    "Engine": "engine",
    "Eviction": "methods.eviction",
    "MemoryStore": "store.memory",
    "Method": "methods",
    "Report": "report",
    "SamkvError": "errors",
    "Total": "report",
    "collect_reports": "serving.listeners",
}
"""Public name -> its module."""


def __getattr__(name: str) -> object:
    """Import a name's module on first use, so that ``samkv --help`` does not wait for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

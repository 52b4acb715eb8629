"""Chunk KV caches for RAG on local models: index once, answer from what was read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samkv_integrations.engine import Engine
    from samkv_integrations.errors import SamkvError
    from samkv_integrations.methods import METHODS, Method
    from samkv_integrations.report import Report, Total
    from samkv_integrations.runtimes.transformers.eviction import EVICTIONS, Eviction
    from samkv_integrations.serving.listeners import AnswerEnded, collect_reports
    from samkv_integrations.serving.stream import Answer, AnswerStream
    from samkv_integrations.store.base import MemoryStore
    from samkv_integrations.store.disk import ChunkStore

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
    "EVICTIONS": "runtimes.transformers.eviction",
    "METHODS": "methods",
    "Answer": "serving.stream",
    "AnswerEnded": "serving.listeners",
    "AnswerStream": "serving.stream",
    "ChunkStore": "store.disk",
    "Engine": "engine",
    "Eviction": "runtimes.transformers.eviction",
    "MemoryStore": "store.base",
    "Method": "methods",
    "Report": "report",
    "SamkvError": "errors",
    "Total": "report",
    "collect_reports": "serving.listeners",
}
"""Public name -> its module."""


def __getattr__(name: str) -> object:
    """Import the module of a name when it is asked for: ``samkv --help`` need not wait for torch.

    Raises MissingExtra for a name whose module needs a runtime, if none is installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from samkv_integrations.runtimes import require_runtime

    home = _HOMES[name]
    if home not in ("errors", "report"):
        require_runtime()
    return getattr(import_module(f"{__name__}.{home}"), name)

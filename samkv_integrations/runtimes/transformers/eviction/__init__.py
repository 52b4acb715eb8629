"""The eviction rules: those that drop entries, and those that attend to a few at each step."""

from samkv_integrations.runtimes.transformers.eviction.dropping import (
    H2O,
    PyramidKV,
    SageKV,
    SnapKV,
    StreamingLLM,
)
from samkv_integrations.runtimes.transformers.eviction.sparse import (
    InfLLM,
    Quest,
    RetrievalAttention,
)

__all__ = [
    "H2O",
    "InfLLM",
    "PyramidKV",
    "Quest",
    "RetrievalAttention",
    "SageKV",
    "SnapKV",
    "StreamingLLM",
]

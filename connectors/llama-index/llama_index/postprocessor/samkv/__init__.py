"""Retrieved nodes as handles of their chunk caches."""

from __future__ import annotations

from llama_index.postprocessor.samkv.base import SamKVPostprocessor

__all__ = ["SamKVPostprocessor"]

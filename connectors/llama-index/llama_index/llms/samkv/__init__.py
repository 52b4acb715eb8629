"""Answers from chunk caches in LlamaIndex: the LLM, and the transform that fills the caches."""

from __future__ import annotations

from llama_index.llms.samkv.base import SamKVLLM
from llama_index.llms.samkv.transform import SamKVCacheTransform

__all__ = ["SamKVCacheTransform", "SamKVLLM"]

"""From a prompt string to token ids and their positions."""

from __future__ import annotations

from samkv_integrations.prompt.rag_template import rag_prompt

__all__ = ["rag_prompt"]

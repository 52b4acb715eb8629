"""A transformers model, run layer by layer; the only package that imports transformers."""

from __future__ import annotations

from samkv_integrations.runtimes.transformers.model.loading import load_model, load_tokenizer
from samkv_integrations.runtimes.transformers.model.model import Model

__all__ = ["Model", "load_model", "load_tokenizer"]

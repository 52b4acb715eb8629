"""A transformers model, run layer by layer; the only package that imports transformers."""

from __future__ import annotations

from samkv_integrations.model.loading import load_model, load_tokenizer
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampling

__all__ = ["Model", "Sampling", "load_model", "load_tokenizer"]

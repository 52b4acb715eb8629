"""Shapes of models that people use: fields of their configs, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUILTIN = "builtin"
"""The shape that is the built-in model itself, its trained weights included."""

_QWEN = {"model_type": "qwen2", "vocab_size": 151_936, "max_position_embeddings": 32_768,
         "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}  # fmt: skip
_QWEN3 = {**_QWEN, "model_type": "qwen3", "max_position_embeddings": 40_960, "head_dim": 128,
          "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8_192}  # fmt: skip
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8,
          "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
          "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False}  # fmt: skip
_LLAMA32 = {**_LLAMA, "intermediate_size": 8_192, "tie_word_embeddings": True,
            "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0}}  # fmt: skip

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN, "hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        **_QWEN, "hidden_size": 1_536, "intermediate_size": 8_960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "qwen2.5-7b": {
        **_QWEN, "hidden_size": 3_584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA32, "hidden_size": 2_048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64,
    },
    "llama-3.2-3b": {
        **_LLAMA32, "hidden_size": 3_072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128,
    },
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4_096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
        "rope_parameters": _QWEN["rope_parameters"], "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        **_QWEN3, "hidden_size": 2_560, "intermediate_size": 9_728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4_096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": {
        **_QWEN3, "hidden_size": 5_120, "intermediate_size": 17_408, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}  # fmt: skip
"""Name -> fields of its transformers config, those that weights, caches and time depend on."""


def shape_names() -> list[str]:
    """What ``--shape`` takes."""
    return [*SHAPES, BUILTIN]

"""Models to time and to size up: shapes of models that people use, or the built-in one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samkv_integrations.errors import InvalidOption, UnknownOption, meant
from samkv_integrations.model.loading import (
    DTYPES,
    load_model,
    load_shape,
    load_tokenizer,
    random_model,
    random_shape,
)
from samkv_integrations.model.model import Model
from samkv_integrations.model.shape import ModelShape

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


def check(shape: str, layers: int | None, dtype: str) -> None:
    """Raise UnknownOption or InvalidOption if there is no such model."""
    if shape not in shape_names():
        raise UnknownOption.among("shape", shape, shape_names())
    if dtype not in DTYPES:
        raise InvalidOption(f"dtype={dtype!r}; allowed: {', '.join(DTYPES)}")
    if layers is None:
        return
    if shape == BUILTIN:
        raise InvalidOption(
            f"layers={layers} with shape={BUILTIN!r}, whose trained layers belong together; leave "
            f"layers out, or give one of {', '.join(SHAPES)}"
        )
    most = SHAPES[shape]["num_hidden_layers"]
    if not 1 <= layers <= most:
        raise InvalidOption(f"layers={layers}; shape {shape!r} takes 1 to {most}")


def sizes_of(name: str, *, layers: int | None, dtype: str) -> ModelShape:
    """The sizes of a shape, or of any other model by its config; no weights are looked at.

    layers: how many it has; None for all.

    Raises:
        UnknownOption: the name is no shape, no folder or file and no hub id of anybody.
        InvalidOption: any other value that there is not.
        ModelNotFound: a folder or hub id without a config.
        UnsupportedModel: a model that could not be computed exactly.
    """
    if name in SHAPES:
        found = random_shape(SHAPES[name], name=name, dtype=dtype)
    elif name in (BUILTIN, "smollm2") or "/" in name or Path(name).exists():
        found = load_shape(name, dtype=dtype)
    else:
        raise UnknownOption(
            f"unknown model {name!r}; known shapes: {', '.join(shape_names())}"
            f"{meant(name, shape_names())} Or give a folder with a config.json, a GGUF "
            "file, or a hub id"
        )
    if layers is None:
        return found
    if not 1 <= layers <= found.n_layers:
        raise InvalidOption(f"layers={layers}; {name!r} has 1 to {found.n_layers}")
    return replace(found, n_layers=layers)


def build(
    shape: str, *, layers: int | None, dtype: str, device: str, seed: int, window: int
) -> Model:
    """The model of this shape, whose answers no token ends.

    layers: how many it has; None for all. window: tokens that it must take. Random weights know no
    longest prompt, so theirs is widened where the shape's own is too short; the built-in model's
    is as it was trained.
    """
    check(shape, layers, dtype)
    if shape == BUILTIN:
        model = load_model(BUILTIN, device=device, dtype=dtype)
    else:
        fields = dict(SHAPES[shape])
        fields["max_position_embeddings"] = max(fields["max_position_embeddings"], window)
        name = f"{shape} (random weights)"
        if layers is not None and layers != fields["num_hidden_layers"]:
            name = f"{shape}, {layers} of {fields['num_hidden_layers']} layers (random weights)"
            fields["num_hidden_layers"] = layers
        model = random_model(fields, name=name, dtype=dtype, device=device, seed=seed)
    # Tokens per second are measured over as many tokens for every method, whatever they say.
    model.eos_ids = frozenset()
    return model


def save(model: Model, folder: Path) -> Model:
    """Write a model of `build` with random weights, and return it as another process loads it.

    Its answers there are texts of as many tokens as are asked for: whatever its tokenizer cannot
    say, and what ends an answer, is never the most likely token.
    """
    model.hf.config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    # transformers may take another class for it, by the kind of the model, and cut words otherwise
    tokenizer = load_tokenizer(str(folder))
    weight = model.hf.get_output_embeddings().weight
    silent = torch.ones(len(weight), dtype=torch.bool)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token], skip_special_tokens=True)
        silent[token] = not text or "\N{REPLACEMENT CHARACTER}" in text
    with torch.no_grad():
        weight[silent.to(weight.device)] = 0  # the best of thousands of random logits is above 0
    model.hf.save_pretrained(folder)
    return Model(model.hf, tokenizer, model.name)


def device_name(model: Model) -> str:
    """What computes: ``cpu``, or the name of the GPU."""
    on_gpu = model.device.type == "cuda"
    return torch.cuda.get_device_name(model.device) if on_gpu else str(model.device)


class Words:
    """Texts of a given length, made of random words that are one token of ``model`` each."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model = model
        self._rng = random.Random(seed)
        pieces = sorted(model.tokenizer.get_vocab())
        words = [model.tokenizer.convert_tokens_to_string([piece]) for piece in pieces]
        known = [
            word[1:] for word in words
            if word.startswith(" ") and len(word) > 2 and word[1:].isalpha() and word.islower()
        ]  # fmt: skip
        self._known = [word for word in known if self.count(" " + word) == 1]
        self._first = [word for word in self._known if self.count(word) == 1]
        assert self._first, "the tokenizer has no words"

    def text(self, n_tokens: int) -> str:
        """Words of ``n_tokens`` tokens in all."""
        others = self._rng.choices(self._known, k=n_tokens - 1)
        return " ".join([self._rng.choice(self._first), *others])

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return len(self._model.tokenize(text, special=False))

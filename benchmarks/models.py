"""Models to time: random weights in the shape of models that people use, or the built-in one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import shapes
from benchmarks.shapes import BUILTIN, shape_names
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.option import DTYPES
from samkv_integrations.runtimes.transformers import loading
from samkv_integrations.runtimes.transformers.loading import (
    builtin_path,
    load_model,
    load_tokenizer,
    use_threads,
)
from samkv_integrations.runtimes.transformers.runtime import Model


def use_threads_for(model: str) -> None:
    """Use one thread for the built-in model, which is too small for a second one to help."""
    if model == BUILTIN:
        use_threads(1)


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
            f"layers out, or give one of {', '.join(shapes.SHAPES)}"
        )
    most = shapes.SHAPES[shape]["num_hidden_layers"]
    if not 1 <= layers <= most:
        raise InvalidOption(f"layers={layers}; shape {shape!r} takes 1 to {most}")


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
        fields = dict(shapes.SHAPES[shape])
        fields["max_position_embeddings"] = max(fields["max_position_embeddings"], window)
        name = f"{shape} (random weights)"
        if layers is not None and layers != fields["num_hidden_layers"]:
            name = f"{shape}, {layers} of {fields['num_hidden_layers']} layers (random weights)"
            fields["num_hidden_layers"] = layers
        model = random_model(fields, name=name, dtype=dtype, device=device, seed=seed)
    # Tokens per second are measured over as many tokens for every method, whatever they say.
    model.eos_ids = frozenset()
    return model


def random_model(
    shape: Mapping[str, Any], *, name: str, dtype: str, device: str, seed: int
) -> Model:
    """A model with random weights and the reference model's tokenizer, for timings.

    shape: fields of a transformers config, ``model_type`` among them. Nothing is downloaded.
    dtype: ``float32``, ``bfloat16``, or ``auto`` for bfloat16 where it is fast.

    Raises InvalidOption for a device that this machine lacks, before anything is built.
    """
    place, fields = loading.device_of(device), dict(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if dtype == "auto":
        dtype = "float32" if loading.bfloat16_is_slow(place) else "bfloat16"
    torch.manual_seed(seed)
    with place:
        auto: Any = AutoModelForCausalLM
        hf = auto.from_config(config, dtype=getattr(torch, dtype))
    return Model(hf, AutoTokenizer.from_pretrained(str(builtin_path())), name)


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

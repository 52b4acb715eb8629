"""What tests of laws share: a prompt, its chunks, and when two answers are the same."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.asking import Asked, ask
from tests.support.models import FAMILIES, tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
"""Of logits and entries in float32; see `tests/laws/test_limit_laws.py`."""


def words(seed: int, n: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghij klmnop\nqrs") for _ in range(n)).strip() or "x"


CHUNKS = [words(seed, n) for seed, n in enumerate((90, 41, 17, 66, 24))]
FROM_THE_START = "\n\n".join(CHUNKS) + "\n\nQuestion: why?"
PROMPT = "Read:\n\n" + "\n\n-- more\n".join(CHUNKS) + "\n\nQuestion: why?\nAnswer:"
FOLLOW = (70, 9, 201, 33, 8, 61, 97, 115)
"""Tokens that an answer is made to go on with."""


def first_logits(
    engine: Engine, prompt: str, chunks: list[str] | None, method: Method | str
) -> tuple[Tensor, Asked]:
    asked = ask(engine, prompt, chunks, method)
    return asked.first.logits, asked


def plain_logits(model: Model, layout: TensorLayout) -> Tensor:
    """The plain forward of transformers over the same token ids."""
    with torch.inference_mode():
        logits: Tensor = model.hf(layout.token_ids[None]).logits[0, -1]
        return logits


def assert_same_answer(query: Asked, logits: Tensor, expected: Tensor, other: Asked) -> None:
    """The same first token, and the same entries for those after it."""
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert query.cache.lengths == other.cache.lengths
    for layer, n_entries in enumerate(query.cache.lengths):
        for side in ("keys", "values"):
            mine, theirs = (getattr(q.cache, side)[layer][:n_entries] for q in (query, other))
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


WITH_BITS = [*((family, 16) for family in FAMILIES), ("llama", 4), ("qwen3", 4), ("qwen2", 8)]
"""Every family, and entries of few bits."""


def mixed(weight: float, cached: Tensor, computed: Tensor) -> Tensor:
    """An update rule of a constant weight: 1 replaces it, 0 keeps the cached entry."""
    return torch.lerp(cached.float(), computed.float(), weight).to(computed.dtype)


WHOLE_IS_FASTER = CostModel(layer_s=1.0, token_s=0.0, pair_s=0.0, entry_s=1.0, read_s=1.0)
"""With which ``auto`` is full prefill, so that no law hangs on an estimate that is nearly even."""


def engine_of(family: str, store_bits: int, *, prefix_bytes: int = 0) -> Engine:
    """An engine whose answers know nothing of each other, unless it has room for beginnings."""
    engine = Engine(
        tiny_model(family),
        block_size=8,
        store_bits=store_bits,
        prefix_bytes=prefix_bytes,
        prefix="bos",
    )
    engine.costs = WHOLE_IS_FASTER
    engine.cache_chunks(CHUNKS)
    return engine


@cache
def shared_engine(family: str, store_bits: int) -> Engine:
    """The same one for all laws that change nothing about it, but may cache more chunks."""
    return engine_of(family, store_bits)


def changed(name: str, **options: float) -> Method:
    """A method with other options of its recomputation."""
    method = METHODS[name]
    return replace(method, recompute=replace(method.recompute, **options))

"""Caches of few bits are within half a step of what the model computed, and move logits by that."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.store.chunk import ChunkCache
from tests.support.chunks import cache_of, decoded, key_steps, transformed
from tests.support.covering import covering
from tests.support.laws import CHUNKS
from tests.support.models import FAMILIES, tiny_model


@cache
def one_by_one(family: str, store_bits: int) -> Engine:
    """Chunks are prefilled alone, so that their keys are the same to the bit in every engine."""
    engine = Engine(tiny_model(family), block_size=8, store_bits=store_bits)
    for chunk in CHUNKS:
        engine.cache_chunks([chunk])
    return engine


def steps(coarse: ChunkCache) -> tuple[Tensor, Tensor]:
    """(L, T, G, D) steps of a chunk's keys, and (L, T, G, 1) of its values, from its bytes."""
    n_heads = coarse.fingerprint.n_kv_heads
    ranges = torch.from_numpy(coarse.entries)[..., -4 * n_heads :].contiguous()
    return key_steps(coarse), ranges.view(torch.float16).float()[..., :n_heads, None]


def what_is_quantised(chunk: ChunkCache) -> tuple[Tensor, Tensor]:
    """(L, T, G, D) each: the transform of a chunk's keys, and its values."""
    keys, values = decoded(chunk)
    return transformed(keys), values


def size(logits: Tensor) -> float:
    return float(logits.square().mean().sqrt())


@pytest.mark.parametrize(("family", "store_bits"), covering(FAMILIES, [4, 8]))
def test_entries_of_few_bits_are_within_half_a_step(family: str, store_bits: int) -> None:
    """Of its channel of the transform for a key, of its token and head for a value; 1e-5 for
    float32 rounding."""
    exact, coarse = one_by_one(family, 16), one_by_one(family, store_bits)
    for text in CHUNKS:
        ways = zip(
            what_is_quantised(cache_of(exact, text)), what_is_quantised(cache_of(coarse, text)),
            steps(cache_of(coarse, text)), strict=True,
        )  # fmt: skip
        for true, found, step in ways:
            assert bool(((found - true).abs() <= step / 2 + 1e-5 * true.abs().max()).all())
            # not closer than few bits can be: an error that is uniform is a quarter step in size
            assert float((found - true).abs().mean()) > 0.15 * float(step.mean())


ORDERS = [[*CHUNKS[i:], *CHUNKS[:i]] for i in range(len(CHUNKS))]


def all_logits(engine: Engine, method: str) -> Tensor:
    """Of the first token and six after it, for the chunks in every turned order."""
    found = [
        engine.logits(
            "Read:\n" + "\n".join(order) + f"\n\n{len(order[0])} of what?", order,
            follow=(70, 9, 201, 33, 8, 61), method=method, eviction="none",
        )
        for order in ORDERS
    ]  # fmt: skip
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_8_bits_are_17_times_closer_than_4(family: str) -> None:
    """A step is 1/255 of a range instead of 1/15, and errors this small move logits in proportion.

    Half to twice of that: these are the sizes of two draws of rounding.
    """
    engines = [one_by_one(family, store_bits) for store_bits in (16, 8, 4)]
    true, eight, four = (all_logits(engine, "reuse") for engine in engines)
    assert 17 / 2 < size(four - true) / size(eight - true) < 17 * 2

"""What answers over caches must equal, on llama.cpp: full prefill where they compute the same.

Tiny models of random float32 weights: their logits are far apart, and rounding shows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from samkv_integrations import Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.baselines import RecomputeAll
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from tests.support.llama_cpp import smollm2, tiny, with_llama_cpp

pytestmark = with_llama_cpp

FAMILIES = ("llama", "qwen2", "qwen3")
CHUNKS = [
    "The harbour of Ostmere was built in 1874, and enlarged twice, by engineers of the navy.",
    "The town library holds 5120 books; it opens at nine, and closes late on market days.",
    "Two trains a day run to Ostmere; the line was laid by Ida Brandt, who had come from Varen.",
]
PROMPT = "Read:\n\n" + "\n\n".join(CHUNKS) + "\n\nQuestion: Who laid the line?\nAnswer:"
ALL = replace(METHODS["reuse"], name="all", recompute=RecomputeAll())
SHAPES = 0.03
"""llama.cpp sums attention in float16 where few tokens are computed at once: logits of the same
tokens differ by up to 1 percent, depending on which are computed together."""


@cache
def engine_of(family: str, store_bits: int = 16) -> Engine:
    engine = Engine(tiny(family), store_bits=store_bits, prefix_bytes=0, prefix="none")
    engine.cache_chunks(CHUNKS)
    return engine


def differs(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The largest difference of logits, relative to their spread."""
    return float(np.abs(one - other).max() / other.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_recomputed_is_full_prefill(family: str) -> None:
    engine = engine_of(family)
    full = engine.logits(PROMPT, CHUNKS, method="recompute")
    assert differs(engine.logits(PROMPT, CHUNKS, method=ALL), full) < SHAPES
    assert differs(engine.logits(PROMPT, CHUNKS, method="reuse"), full) > 5 * SHAPES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_where_it_was_cached_is_exact(family: str) -> None:
    engine = engine_of(family)
    prompt = f"{CHUNKS[0]}\n\nQuestion: why?"
    full = engine.logits(prompt, CHUNKS[:1], method="recompute")
    reused = engine.logits(prompt, CHUNKS[:1], method="reuse")
    assert engine.generate(prompt, CHUNKS[:1], method="reuse").report.reused == 1
    assert differs(reused, full) < SHAPES


@pytest.mark.parametrize("family", FAMILIES)
def test_few_bits_are_near(family: str) -> None:
    exact, *rounded = (
        engine_of(family, bits).logits(PROMPT, CHUNKS, method="reuse") for bits in (16, 8, 4)
    )
    of_8, of_4 = (differs(each, exact) for each in rounded)
    assert 0 < of_8 < 0.1
    assert of_8 < of_4


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_gives_the_same_as_computing_it(family: str) -> None:
    engine = Engine(tiny(family), method="recompute")
    engine.generate(PROMPT, max_new_tokens=4)
    longer = f"{PROMPT} It was"
    kept = engine.logits(longer)
    assert differs(kept, engine_of(family).logits(longer, method="recompute")) < SHAPES


SCALED = {
    "linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "yarn": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_are_measured_too(kind: str) -> None:
    model = tiny("llama", extra=SCALED[kind])
    assert model.refuses_chunks is None
    engine = Engine(model, store_bits=16, prefix_bytes=0, prefix="none")
    engine.cache_chunks(CHUNKS)
    full = engine.logits(PROMPT, CHUNKS, method="recompute")
    assert differs(engine.logits(PROMPT, CHUNKS, method=ALL), full) < SHAPES
    first = f"{CHUNKS[0]}\n\nQuestion: why?"
    reused = engine.logits(first, CHUNKS[:1], method="reuse")
    assert differs(reused, engine.logits(first, CHUNKS[:1], method="recompute")) < SHAPES


def greedy(model: LlamaCppModel, ids: list[int], n_tokens: int) -> list[int]:
    """llama.cpp's own answer, in a loop that knows nothing of this package's."""
    context, found = model.context, list[int]()
    for start in range(0, len(ids), 512):
        part = ids[start : start + 512]
        logits = context.decode(
            part, range(start, start + len(part)), [0] * len(part), [len(part) - 1]
        )
    for position in range(len(ids), len(ids) + n_tokens):
        found.append(int(logits[0].argmax()))
        if found[-1] in model.eos_ids:
            break
        logits = context.decode(found[-1:], [position], [0], [0])
    context.clear()
    return found


@pytest.mark.slow  # a hundred answers, each twice: 48 CPU seconds
def test_recompute_is_llama_cpps_own_greedy_answer() -> None:
    alone, model = smollm2(), smollm2()
    engine = Engine(model, method="recompute", prefix_bytes=0)
    for number in range(100):
        prompt = f"{CHUNKS[number % 3]}\n\nQuestion {number}: What is told here?\nAnswer:"
        answer = engine.generate(prompt, max_new_tokens=8, draft=0)
        ids = alone.tokenize_prompt(engine.render(prompt))
        expected = greedy(alone, ids, 8)
        assert answer.text == alone.detokenize([t for t in expected if t not in alone.eos_ids])

"""First tokens of prompts that end with a chunk."""

from __future__ import annotations

import pytest
import torch

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS
from tests.support.asking import ask
from tests.support.laws import CHUNKS, PROMPT, plain_logits
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    # what an earlier test has asked is not held: every answer computes its whole beginning
    engine = Engine(tiny_model("llama"), block_size=8, prefix_bytes=0)
    engine.cache_chunks(CHUNKS)
    return engine


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_ends_with_a_chunk_is_answered(engine: Engine, method: str) -> None:
    """Its last token is computed, and so has no stored key."""
    prompt = PROMPT[: PROMPT.index("\n\nQuestion")]
    asked = ask(engine, prompt, CHUNKS, method)
    assert bool(asked.first.logits.isfinite().all())
    assert not bool(asked.recomputed[:, -1].any())
    if method == "recompute":
        expected = plain_logits(engine.model, asked.layout)
        torch.testing.assert_close(asked.first.logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("method", ["reuse-local", "ape"])
def test_a_prompt_that_ends_before_the_place_where_its_chunk_was_prefilled(method: str) -> None:
    """The prefix was longer than the rest of the prompt, and an IndexError came out."""
    engine = Engine(tiny_model("llama"), block_size=8, prefix_text="You are a helpful assistant.")
    engine.cache_chunks(CHUNKS[:1])
    logits = engine.logits(CHUNKS[0], method=method)
    assert logits.isfinite().all()

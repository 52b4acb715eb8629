"""What a blended answer takes from memory, and what its pass leaves there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.right_answers import kl
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.model.quoting import RenderedPrompt
from tests.support.models import tiny_model

CHUNKS = [
    "The mill of Orvik was built in 1871 by two brothers from the north, who sold it in 1902.",
    "Tessel bridge carries the road to the harbour; it is painted green and closed in winter.",
]
HEAD, QUESTION = "System: answer from the documents.\n\n", "\n\nQuestion: who built the mill?"


def prompt_of(chunks: list[str], head: str = HEAD) -> str:
    return head + "\n\n".join(chunks) + QUESTION


def test_memory_of_chunks_computed_with_the_prompt_serves_a_blended_answer(tmp_path: Path) -> None:
    engine = Engine(
        tiny_model("llama"), ChunkStore(tmp_path / "kv"), store_bits=16, method="epic", block_size=8
    )
    engine.cache_chunks(CHUNKS[1:])
    full = engine.logits(prompt_of(CHUNKS), method="recompute")
    # the first chunk has no cache: it is computed with the prompt, and left in memory
    engine.generate(prompt_of(CHUNKS), CHUNKS[1:], max_new_tokens=1, on_miss="text")
    engine.cache_chunks(CHUNKS[:1])
    report = engine.generate(prompt_of(CHUNKS), method="reuse", max_new_tokens=1).report
    assert (report.ran, report.reused, report.prefix_chunks) == ("reuse", 1, 1)
    n_of_first = len(engine.model.tokenize(CHUNKS[0], special=False))
    assert report.exact_tokens >= n_of_first - 2
    assert report.prefix_tokens > report.exact_tokens
    assert report.recompute_ratio < 0.05
    held = engine.logits(prompt_of(CHUNKS), method="reuse")
    engine.prefixes.clear()
    without = engine.logits(prompt_of(CHUNKS), method="reuse")
    assert float(kl(full, held)[0]) < float(kl(full, without)[0])
    engine.forget(CHUNKS[:1])
    assert (
        engine.generate(prompt_of(CHUNKS), CHUNKS[1:], max_new_tokens=1).report.prefix_tokens < 20
    )


def test_what_a_blended_pass_leaves_in_memory_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full prefill takes it, so no attention that rounds its scores may have made it."""
    model, held = tiny_model("llama", torch.bfloat16), []
    prompt = prompt_of(CHUNKS, head="You answer questions of sailors about the harbour. " * 3)
    for rounds in (False, True):
        monkeypatch.setattr(
            "samkv_integrations.model.attention.products_are_faster", lambda rounds=rounds: rounds
        )
        store = ChunkStore(tmp_path / str(rounds))
        engine = Engine(model, store, method="reuse")
        engine.cache_chunks(CHUNKS)
        assert engine.generate(prompt, max_new_tokens=1).report.reused == 2
        ids = torch.tensor(model.tokenize_prompt(RenderedPrompt(prompt)))
        held.append(engine.prefixes.find(engine.fingerprint.computed_by, ids))
    for plain, other in zip(held[0].keys, held[1].keys, strict=True):
        torch.testing.assert_close(plain, other, rtol=0.0, atol=0.0)

"""What a blended answer leaves in memory: nothing that full prefill takes is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.plan.kept_sequences import KeptSequence
from samkv_integrations.runtimes.base import FirstEntries
from tests.support.models import tiny_model

CHUNKS = [
    "The mill of Orvik was built in 1871 by two brothers from the north, who sold it in 1902.",
    "Tessel bridge carries the road to the harbour; it is painted green and closed in winter.",
]
HEAD, QUESTION = "System: answer from the documents.\n\n", "\n\nQuestion: who built the mill?"


def prompt_of(chunks: list[str], head: str = HEAD) -> str:
    return head + "\n\n".join(chunks) + QUESTION


def kept_by(engine: Engine) -> KeptSequence[FirstEntries]:
    (only,) = engine.sequences._sequences  # noqa: SLF001
    return only


def test_what_a_blended_pass_leaves_in_memory_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full prefill takes it, so no attention that rounds its scores may have made it."""
    model, held = tiny_model("llama", torch.bfloat16), []
    prompt = prompt_of(CHUNKS, head="You answer questions of sailors about the harbour. " * 3)
    for rounds in (False, True):
        monkeypatch.setattr(
            "samkv_integrations.runtimes.transformers.model.attention.products_are_faster",
            lambda rounds=rounds: rounds,
        )
        store = ChunkStore(tmp_path / str(rounds))
        engine = Engine(model, store, method="reuse")
        engine.cache_chunks(CHUNKS)
        assert engine.generate(prompt, max_new_tokens=1).report.reused == 2
        held.append(kept_by(engine))
    n_exact = held[0].n_exact
    assert n_exact >= 100 and held[1].n_exact == n_exact
    for layer in range(model.n_layers):
        for plain, other in zip(*(of.entries.of_layer(layer, n_exact) for of in held), strict=True):
            torch.testing.assert_close(plain, other, rtol=0.0, atol=0.0)

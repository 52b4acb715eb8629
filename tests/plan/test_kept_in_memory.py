"""What an engine's memory of sequences holds, and when it is freed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.laws import CHUNKS
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.tested_runtime import model_class

ROOM = 2**26
PROMPT = f"Read.\n\n{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nQ: who was it?"
OTHER = "Something else is asked here."


def engine_on(folder: Path, model: Model | None = None) -> Engine:
    store = ChunkStore(folder / "kv")
    engine = Engine(model or tiny_model("llama"), store, prefix_bytes=ROOM, block_size=8)
    engine.cache_chunks(CHUNKS)
    return engine


def n_kept(engine: Engine) -> int:
    return len(engine.sequences._sequences)  # noqa: SLF001


def test_a_method_with_other_options_is_another_method(tmp_path: Path) -> None:
    engine, usual = engine_on(tmp_path), METHODS["epic"]
    other = replace(usual, recompute=replace(usual.recompute, first=3))
    first = engine.generate(PROMPT, method=usual, max_new_tokens=1).report
    followed = f"{PROMPT} Yes. And then?"
    found = engine.generate(followed, method=other, max_new_tokens=1).report
    assert found.reused == 2 and found.prefix_tokens <= PROMPT.index(CHUNKS[0]) + 1
    again = engine.generate(followed, method=usual, max_new_tokens=1).report
    assert again.prefix_tokens >= first.prompt_tokens - 1


def test_a_deletion_frees_memory_at_once(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    for delete in (
        lambda: engine.forget([CHUNKS[0]]),
        lambda: engine.delete([engine.key_of(CHUNKS[1])]),
    ):
        engine.generate(PROMPT, max_new_tokens=1)
        assert engine.sequences.n_bytes > 0
        delete()
        assert engine.sequences.n_bytes == 0


def test_another_ones_deletion_frees_it_with_the_next_question(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    engine.generate(PROMPT, max_new_tokens=1)
    ChunkStore(tmp_path / "kv").delete(engine.key_of(CHUNKS[2]))
    engine.generate(OTHER, max_new_tokens=1)
    assert n_kept(engine) == 1


def test_a_change_of_the_model_frees_it_with_the_next_question(tmp_path: Path) -> None:
    model = Model(hf_model("llama"), byte_tokenizer(bos=True), "changing")
    engine = engine_on(tmp_path, model)
    engine.generate(PROMPT, max_new_tokens=1)
    with torch.no_grad():
        model.hf.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    engine.generate(OTHER, max_new_tokens=1)
    assert n_kept(engine) == 1


def test_an_answer_is_not_exact_if_the_runtime_decodes_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tmp_path)
    for is_exact in (True, False):
        engine.sequences.clear()
        monkeypatch.setattr(model_class(), "decodes_exactly", is_exact)
        report = engine.generate(PROMPT, method="recompute", max_new_tokens=6).report
        (kept,) = engine.sequences._sequences  # noqa: SLF001
        assert len(kept.token_ids) > report.prompt_tokens
        assert kept.n_exact == (len(kept.token_ids) if is_exact else report.prompt_tokens)

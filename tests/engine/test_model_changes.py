"""Caches of one model are never answered from by another, nor by itself once it has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import (
    HandleError,
    StoreError,
    UnsupportedModel,
)
from samkv_integrations.runtimes.transformers import runtime
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.base import Store
from samkv_integrations.store.memory import MemoryStore
from tests.support.costs import ONE_PASS
from tests.support.covering import covering
from tests.support.handles import issued
from tests.support.models import byte_tokenizer, hf_model
from tests.support.served import PROMPT, TEXTS

Change = Callable[[Any], object]


def engine_of(hf: Any, store: Store | None = None, **options: Any) -> Engine:  # noqa: ANN401
    options = {"method": "samkv-guided", "block_size": 8, "prefix_bytes": 0} | options
    model = Model(hf, byte_tokenizer(bos=True), "tiny")
    return Engine(model, MemoryStore() if store is None else store, **options)


def in_one_value(hf: Any) -> None:  # noqa: ANN401
    """In a matrix that chunk caches depend on, and by so much that it shows."""
    with torch.no_grad():
        hf.model.layers[0].self_attn.k_proj.weight[3, 5] += 9


def in_epsilon(hf: Any) -> None:  # noqa: ANN401
    """As another config.json would have made it."""
    hf.config.rms_norm_eps = 0.05
    for module in hf.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.05


def in_scaling(hf: Any) -> None:  # noqa: ANN401
    for layer in hf.model.layers:
        layer.self_attn.scaling *= 1.5


def behind_its_back(hf: Any) -> None:  # noqa: ANN401
    hf.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 9


def changed(change: Change) -> Any:  # noqa: ANN401
    hf = hf_model("llama")
    change(hf)
    return hf


def logits(engine: Engine) -> torch.Tensor:
    return engine.logits(PROMPT, TEXTS, follow=[9, 8, 7])


@pytest.mark.parametrize("change", [in_one_value, in_epsilon, in_scaling])
def test_a_model_that_differs_shares_no_cache(tmp_path: Path, change: Change) -> None:
    """Each of these once had the fingerprint of the model that filled the store."""
    engine_of(hf_model("llama"), ChunkStore(tmp_path)).cache_chunks(TEXTS)
    other = engine_of(changed(change), ChunkStore(tmp_path))
    report = other.generate(PROMPT, TEXTS, on_miss="text", max_new_tokens=4).report
    assert (report.reused, report.chunk_misses) == (0, {"absent": 3})
    other.cache_chunks(TEXTS)
    alone = engine_of(changed(change))
    alone.cache_chunks(TEXTS)
    assert torch.equal(logits(other), logits(alone))


@pytest.mark.parametrize(
    ("change", "block_size", "on_miss"),
    covering([in_one_value, in_epsilon], [8, "auto"], ["text", "compute"], times=2),
)
def test_a_change_in_place_between_two_questions(
    change: Change, block_size: Any, on_miss: Any
) -> None:
    engine = engine_of(hf_model("llama"), block_size=block_size)
    engine.cache_chunks(TEXTS)
    before = engine.fingerprint
    assert engine.generate(PROMPT, max_new_tokens=4).report.reused == 3
    change(engine.model.hf)
    answer = engine.generate(PROMPT, TEXTS, on_miss=on_miss, max_new_tokens=4)
    fresh = engine_of(changed(change), block_size=block_size)
    expected = fresh.generate(PROMPT, TEXTS, on_miss=on_miss, max_new_tokens=4)
    assert answer.text == expected.text
    assert (answer.report.reused, answer.report.chunk_misses) == (0, {"absent": 3})
    assert engine.fingerprint == fresh.fingerprint != before
    engine.cache_chunks(TEXTS)
    fresh.cache_chunks(TEXTS)
    assert engine.generate(PROMPT, max_new_tokens=4).report.reused == 3
    assert torch.equal(logits(engine), logits(fresh))


def test_beginnings_of_prompts_go_with_the_weights_that_computed_them() -> None:
    engine = engine_of(hf_model("llama"), method="auto", prefix_bytes=2**24)
    engine.costs = ONE_PASS
    engine.cache_chunks(TEXTS)
    ran = [engine.generate(PROMPT, max_new_tokens=4).report.ran for _ in range(2)]
    assert ran == ["recompute", "prefix"]
    in_one_value(engine.model.hf)
    answer = engine.generate(PROMPT, max_new_tokens=4)
    fresh = engine_of(changed(in_one_value), method="auto")
    fresh.costs = ONE_PASS
    assert answer.report.ran == "recompute"
    assert answer.text == fresh.generate(PROMPT, max_new_tokens=4).text


def test_a_handle_of_a_cache_that_no_longer_fits_is_refused() -> None:
    engine = engine_of(hf_model("llama"))
    engine.cache_chunks(TEXTS)
    asked = f"{issued(engine, TEXTS[0])}\n\nQ?"
    in_one_value(engine.model.hf)
    with pytest.raises(HandleError, match="whose model has changed; retrieve again"):
        engine.generate(asked, max_new_tokens=1)
    assert engine.issue_handle(TEXTS[0]) is None
    engine.cache_chunks(TEXTS)
    report = engine.generate(f"{issued(engine, TEXTS[0])}\n\nQ?", max_new_tokens=1).report
    assert (report.found, report.chunk_misses) == (1, {})


def test_refresh_is_for_what_was_written_behind_pytorchs_back() -> None:
    engine = engine_of(hf_model("llama"))
    engine.cache_chunks(TEXTS)
    assert engine.refresh() is False
    assert engine.generate(PROMPT, max_new_tokens=4).report.reused == 3
    behind_its_back(engine.model.hf)
    assert engine.refresh() is True
    assert engine.fingerprint == engine_of(changed(in_one_value)).fingerprint
    answer = engine.generate(PROMPT, TEXTS, on_miss="text", max_new_tokens=4)
    assert answer.report.reused == 0
    fresh = engine_of(changed(in_one_value))
    assert answer.text == fresh.generate(PROMPT, TEXTS, on_miss="text", max_new_tokens=4).text


def test_nothing_is_served_after_a_conversion() -> None:
    engine = engine_of(hf_model("llama"))
    engine.cache_chunks(TEXTS)
    engine.model.hf.to(torch.bfloat16)
    for asked in (
        lambda: engine.generate(PROMPT, max_new_tokens=1),
        lambda: engine.cache_chunks(TEXTS),
        lambda: engine.refresh(),
        lambda: engine.fingerprint,
    ):
        with pytest.raises(UnsupportedModel, match="make a new Model and Engine"):
            asked()
    engine.model.hf.to(torch.float32)  # rounded: other weights
    assert not engine.is_cached(TEXTS[0])


def while_computing(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Have the model changed by somebody else during the next pass over chunks."""
    plain = runtime.prefill

    def prefill(model: Model, *rest: Any) -> Any:  # noqa: ANN401
        monkeypatch.setattr(runtime, "prefill", plain)
        made = plain(model, *rest)
        change(model.hf)
        return made

    monkeypatch.setattr(runtime, "prefill", prefill)


def test_what_a_changing_model_computes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(hf_model("llama"))
    while_computing(monkeypatch, in_one_value)
    with pytest.raises(StoreError, match="the model changed while chunks were being cached"):
        engine.cache_chunks(TEXTS)
    assert engine.store.fingerprints() == []
    engine.cache_chunks(TEXTS)
    fresh = engine_of(changed(in_one_value))
    fresh.cache_chunks(TEXTS)
    assert torch.equal(logits(engine), logits(fresh))


def test_nor_what_it_computes_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(hf_model("llama"))
    while_computing(monkeypatch, in_one_value)
    engine.generate(PROMPT, TEXTS, on_miss="compute", max_new_tokens=1)
    assert engine.store.fingerprints() == []
    report = engine.generate(PROMPT, TEXTS, on_miss="compute", max_new_tokens=1).report
    assert report.computed_now == 3 and engine.store.fingerprints() == [engine.fingerprint]


def test_entries_of_a_prefix_go_with_the_model_that_computed_them() -> None:
    """It changed after its fingerprint was taken, and changed back."""
    engine = engine_of(hf_model("llama"))
    weight = engine.model.hf.model.layers[0].self_attn.k_proj.weight
    before, chunks = weight.detach().clone(), engine.chunks
    made_by, found = chunks.follow_model(), chunks.refer(TEXTS)
    in_one_value(engine.model.hf)
    engine.scheduler.run(lambda pause: chunks.model.prefill(found, made_by, chunks.prefix, pause))
    with torch.no_grad():
        weight.copy_(before)
    engine.cache_chunks(TEXTS)
    assert engine.fingerprint == made_by and chunks.prefix
    fresh = engine_of(hf_model("llama"))
    fresh.cache_chunks(TEXTS)
    assert torch.equal(logits(engine), logits(fresh))

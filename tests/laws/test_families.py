"""The laws on families whose layers differ: windows, several RoPEs, sinks, bounds, experts.

Where transformers computes something in more than one way, the eager one is the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TorchAoConfig

from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption, PromptTooLong, UnsupportedModel
from samkv_integrations.lab.doctor import examine
from samkv_integrations.lab.inspection import inspect
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.model.families import FAMILIES as SUPPORTED
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.asking import ask
from tests.support.laws import (
    CHUNKS,
    FOLLOW,
    PROMPT,
    TOLERANCE,
    first_logits,
    plain_logits,
    shared_engine,
)
from tests.support.models import OTHER_FAMILIES, byte_tokenizer, hf_model, save_model, tiny_model

ROOT = Path(__file__).parents[2]
FAMILIES = tuple(OTHER_FAMILIES)
WINDOWED = tuple(
    name for name, (_, config) in OTHER_FAMILIES.items() if config.get("sliding_window")
)


@cache
def eager(family: str) -> torch.nn.Module:
    hf = hf_model(family)
    hf.set_attn_implementation("eager")
    return hf.train(False)


def plainly(family: str, ids: Tensor) -> Tensor:
    """(T, vocabulary) of the plain forward of transformers."""
    with torch.inference_mode():
        logits: Tensor = eager(family)(ids[None], use_cache=False).logits[0]
        return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_full_prefill_and_its_decoding_are_transformers_own(family: str) -> None:
    logits, query = first_logits(shared_engine(family, 16), PROMPT, CHUNKS, "recompute")
    ids = query.layout.token_ids
    expected = plainly(family, torch.cat((ids, torch.tensor(FOLLOW))))
    torch.testing.assert_close(logits, expected[len(ids) - 1], **TOLERANCE)
    torch.testing.assert_close(query.follow(FOLLOW), expected[len(ids) :], **TOLERANCE)
    assert float(logits.std()) > 0.5, "logits too flat to notice a mistake"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_without_chunks(family: str) -> None:
    logits, query = first_logits(shared_engine(family, 16), "Who is there?", None, "auto")
    expected = plainly(family, query.layout.token_ids)[-1]
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_itself_goes_on_working(family: str) -> None:
    ids = torch.arange(30, 130)
    with torch.inference_mode():
        ours = tiny_model(family).hf(ids[None]).logits[0]
    torch.testing.assert_close(ours, plainly(family, ids), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_right_behind_its_prefix_is_exact(family: str) -> None:
    """Chunks longer than the window, too."""
    prompt = f"{CHUNKS[0]}\n\nQuestion: why?"
    logits, query = first_logits(shared_engine(family, 16), prompt, CHUNKS[:1], "reuse")
    assert query.layout.exact.tolist() == [True]
    ids = query.layout.token_ids
    expected = plainly(family, torch.cat((ids, torch.tensor(FOLLOW))))
    torch.testing.assert_close(logits, expected[len(ids) - 1], **TOLERANCE)
    torch.testing.assert_close(query.follow(FOLLOW), expected[len(ids) :], **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_doctor_finds_nothing_wrong(family: str, dtype: torch.dtype) -> None:
    found = list(islice(examine(tiny_model(family, dtype)), 4))
    assert [check.detail for check in found if not check.ok] == []
    assert found[-1].name == "tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_what_comes_after_it(family: str) -> None:
    """Entries that a pass leaves do not depend on the end of the prompt."""
    one, other = (
        ask(shared_engine(family, 16), PROMPT + end, CHUNKS, "reuse")
        for end in (" Because", " Despite")
    )
    n_same = next(
        at for at, (a, b) in enumerate(zip(one.layout.token_ids, other.layout.token_ids,
                                           strict=True)) if a != b
    )  # fmt: skip
    for layer, window in enumerate(tiny_model(family).windows):
        dropped = 0 if window is None else max(0, one.layout.n_tokens - window + 1)
        stop = n_same - dropped
        mine, theirs = (asked.cache.keys[layer][:stop] for asked in (one, other))
        assert stop > 0
        torch.testing.assert_close(mine, theirs, **TOLERANCE)
    assert not torch.allclose(one.first.logits, other.first.logits, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["samkv-guided", "samkv-overwrite", "cacheblend"])
def test_methods_answer_otherwise_than_plain_reuse(family: str, method: str) -> None:
    plain, asked = (
        ask(shared_engine(family, 16), PROMPT, CHUNKS, name) for name in ("reuse", method)
    )
    assert torch.isfinite(asked.first.logits).all()
    assert not torch.allclose(asked.first.logits, plain.first.logits, atol=1e-3)


@pytest.mark.parametrize("family", WINDOWED)
def test_what_a_window_leaves_behind_is_not_kept(family: str) -> None:
    model, asked = tiny_model(family), ask(shared_engine(family, 16), PROMPT, CHUNKS, "reuse")
    n_tokens = asked.layout.n_tokens
    for length, window in zip(asked.cache.lengths, model.windows, strict=True):
        assert length == (n_tokens if window is None else window - 1)
    asked.follow(FOLLOW)
    for length, window in zip(asked.cache.lengths, model.windows, strict=True):
        assert length == len(FOLLOW) + (n_tokens if window is None else window - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_eviction_with_room_for_everything_changes_nothing(family: str) -> None:
    engine = shared_engine(family, 16)
    plain = ask(engine, PROMPT, CHUNKS, "reuse")
    expected = plain.follow(FOLLOW)
    for name in ("quest", "infllm", "retrieval-attention", "snapkv"):
        rule = replace(EVICTIONS[name], budget_ratio=1.0)
        asked = ask(engine, PROMPT, CHUNKS, "reuse", eviction=rule)
        torch.testing.assert_close(asked.first.logits, plain.first.logits, **TOLERANCE)
        torch.testing.assert_close(asked.follow(FOLLOW), expected, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_few_bits_are_near(family: str) -> None:
    exact, _ = first_logits(shared_engine(family, 16), PROMPT, CHUNKS, "reuse")
    rounded, _ = first_logits(shared_engine(family, 8), PROMPT, CHUNKS, "reuse")
    other, _ = first_logits(shared_engine(family, 16), PROMPT, CHUNKS, "recompute")
    assert 0 < float((rounded - exact).norm()) < 0.3 * float((other - exact).norm())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_method_that_weighs_scores_itself_is_refused(family: str) -> None:
    with pytest.raises(InvalidOption, match="method 'ape'.*choose"):
        shared_engine(family, 16).generate(PROMPT, CHUNKS, method="ape", max_new_tokens=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_weights(family: str, tmp_path: Path) -> None:
    quantisation: Any = pytest.importorskip("torchao.quantization")
    save_model(hf_model(family), tmp_path)
    how = TorchAoConfig(quantisation.Int8WeightOnlyConfig())
    model = load_model(
        str(tmp_path), device="cpu", dtype="float32", model_kwargs={"quantization_config": how}
    )
    engine = Engine(model, prefix="bos", store_bits=16)
    logits, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    torch.testing.assert_close(logits, plain_logits(model, query.layout), **TOLERANCE)
    assert model.identity.weights != tiny_model(family).identity.weights


def test_every_family_is_tested_and_in_the_table() -> None:
    tested = {kind for kind, _ in OTHER_FAMILIES.values()} | {"llama", "mistral", "qwen2", "qwen3"}
    page = (ROOT / "docs" / "models.md").read_text()
    rows = page.partition("## Families")[2].partition("Refused")[0].splitlines()
    named = {name for row in rows for name in re.findall("`([a-z0-9_]+)`", row.split(" | ")[0])}
    assert tested == set(SUPPORTED) == named - {"model_type"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_one_family_serves_no_other(family: str) -> None:
    fingerprints = [shared_engine(name, 16).fingerprint.digest for name in FAMILIES]
    assert fingerprints.count(shared_engine(family, 16).fingerprint.digest) == 1


def models_of(families: Sequence[str]) -> list[Model]:
    return [Model(hf_model(name), byte_tokenizer(bos=True), name) for name in families]


def test_a_long_prompt_of_longrope_is_refused() -> None:
    """Other frequencies hold beyond the first range."""
    (model,) = models_of(["phi3, longrope"])
    assert model.context_window == 2048
    with pytest.raises(PromptTooLong, match="context window of 2048"):
        Engine(model).generate("x" * 2100, max_new_tokens=1)
    model.hf(torch.arange(2100)[None] % 200)  # transformers' own writes other frequencies
    (other,) = models_of(["phi3, longrope"])
    mine, theirs = (each.rotation(torch.arange(9)).of(0)[0] for each in (model, other))
    assert torch.equal(mine, theirs)


ODD = [
    # these never look at a window, or give it to all layers, whatever else the config says
    ("llama", {"sliding_window": 48}),
    ("olmo2", {"sliding_window": 48, "layer_types": ["sliding_attention"] * 4}),
    ("mistral, window", {"layer_types": ["full_attention"] * 4}),
    ("mistral, window", {"use_sliding_window": False}),
    ("phi3", {"sliding_window": 48, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("qwen3_moe", {"sliding_window": 48, "use_sliding_window": True}),
    ("phi3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.45
    }}),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "config"), ODD)
def test_a_config_means_what_transformers_makes_of_it(family: str, config: dict[str, Any]) -> None:
    model = Model(hf_model(family, **config), byte_tokenizer(bos=True), "odd")
    engine = Engine(model, block_size=8, store_bits=16, prefix="bos")
    engine.cache_chunks(CHUNKS)
    reference = hf_model(family, **config)
    reference.set_attn_implementation("eager")
    for prompt, chunks, method in (
        (PROMPT, CHUNKS, "recompute"), (f"{CHUNKS[0]} Why?", CHUNKS[:1], "reuse"),
    ):  # fmt: skip
        logits, query = first_logits(engine, prompt, chunks, method)
        with torch.inference_mode():
            expected = reference.train(False)(query.layout.token_ids[None]).logits[0, -1]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize(("family", "window"), [("gemma2", None), ("gemma2", 0), ("mistral", 0)])
def test_a_window_of_nothing_is_refused(family: str, window: int | None) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window=(None|0)"):
        if family == "mistral":
            family = "mistral, window"
        Model(hf_model(family, sliding_window=window), byte_tokenizer(bos=True), "odd")


def test_another_window_later_is_refused() -> None:
    (model,) = models_of(["mistral, window"])
    engine = Engine(model)
    model.config.sliding_window = 16
    with pytest.raises(UnsupportedModel, match="sliding window of .* was changed"):
        engine.cache_chunks(CHUNKS[:1])


def test_granite_goes_on_with_the_factor_it_was_made_with() -> None:
    (model,) = models_of(["granite"])
    model.config.embedding_multiplier = 5.0
    logits, query = first_logits(Engine(model), PROMPT, None, "recompute")
    torch.testing.assert_close(logits, plain_logits(model, query.layout), **TOLERANCE)


def test_longrope_is_the_same_model_after_a_long_prompt() -> None:
    before, after = models_of(["phi3, longrope"] * 2)
    after.hf(torch.arange(2100)[None] % 200)
    assert before.identity.rope == after.identity.rope


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3_text"])
def test_the_attention_that_is_shown_is_the_models(family: str) -> None:
    shown = inspect(shared_engine(family, 16), PROMPT, CHUNKS, method="reuse", max_new_tokens=1)
    hf = hf_model(family)
    hf.set_attn_implementation("eager")
    ids = ask(shared_engine(family, 16), PROMPT, CHUNKS, "recompute").layout.token_ids
    with torch.inference_mode():
        seen = hf.train(False)(ids[None], output_attentions=True).attentions
    expected = torch.stack([layer[0, :, -1].mean(0) for layer in seen])
    torch.testing.assert_close(shown.full_attention, expected, atol=1e-3, rtol=0.0)

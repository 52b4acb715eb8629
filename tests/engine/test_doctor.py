"""The doctor passes every supported family, and notices each kind of mistake that it is for."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cache.windows import MIN_RUN
from samkv_integrations.engine import doctor
from samkv_integrations.engine import prefill as ingest
from samkv_integrations.engine.costs import CostModel, keep_costs, kept_costs, name_of
from samkv_integrations.engine.doctor import CHUNK_TOKENS, CHUNKS, QUESTION_TOKENS, Check, examine
from samkv_integrations.engine.engine import Engine
from samkv_integrations.model.attention import attention
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model
from samkv_integrations.model.quoting import RenderedPrompt
from tests.support.models import byte_tokenizer, hf_model, tiny_model

EXACT = ("full prefill and decoding", "prefix reuse", "key rotation", "tokens")


def examined(model: Model, last: str = "speed") -> dict[str, Check]:
    """All checks up to the last that is asked for."""
    checks = {}
    for check in examine(model):
        checks[check.name] = check
        if check.name == last:
            break
    return checks


@pytest.mark.slow  # the command examines it in every run, in tests/cli/test_doctor.py
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_built_in_model_passes(dtype: str) -> None:
    checks = examined(load_model("builtin", dtype=dtype))
    assert all(check.ok for check in checks.values()), checks
    warned = {name for name, check in checks.items() if check.is_warning}
    assert warned <= {"store_bits"}, checks  # 4 bits may change the likeliest token
    advice = "take store_bits=8" if warned else "take 4, the default"
    assert advice in checks["store_bits"].detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_stored_at_a_position_are_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(ingest, "unrotate", lambda x, cos, sin: x)
    checks = examined(tiny_model("llama", dtype), "prefix reuse")
    assert not checks["prefix reuse"].ok
    assert checks[
        "full prefill and decoding"
    ].ok  # it reads no cached key: the check above is the one needed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_pairing_of_rotated_channels_is_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates channels (0, 1), (2, 3), ... together, as some models do."""
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)

    monkeypatch.setattr(doctor, "rotate", neighbours)
    assert not examined(tiny_model("llama", dtype), "key rotation")["key rotation"].ok


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(
        model,
        "attention",
        lambda layer, query, key, value, scaling, mask, causal: attention(
            query, key, value, scaling, mask, causal=False
        ),
    )
    check = examined(model, "full prefill and decoding")["full prefill and decoding"]
    assert not check.ok


@pytest.mark.parametrize("lost", ["BOS", "of a chat"])
def test_other_tokens_than_transformers_fail(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    original = Model.tokenize_prompt

    def other(model: Model, prompt: RenderedPrompt) -> list[int]:
        ids = original(model, prompt)
        return ids[1:] if prompt.is_chat == (lost == "of a chat") else ids

    monkeypatch.setattr(Model, "tokenize_prompt", other)
    check = examined(tiny_model(), "tokens")["tokens"]
    assert not check.ok and check.detail == "plain prompt and chat: not those of the tokenizer"


@pytest.mark.parametrize(
    ("template", "kinds"),
    [
        ("{{ bos_token }}" * 2, "plain prompt and chat"),  # a chat is as its template has it
        ("", "plain prompt and chat"),
        (None, "plain prompt"),
    ],
)
def test_prompts_have_the_tokens_of_any_template(template: str | None, kinds: str) -> None:
    tokenizer = byte_tokenizer(bos=True)
    after = tokenizer.chat_template.removeprefix("{{ bos_token }}")
    tokenizer.chat_template = None if template is None else template + after
    check = examined(Model(hf_model("llama"), tokenizer, "other"), "tokens")["tokens"]
    assert check.ok and not check.is_warning
    assert check.detail.startswith(f"{kinds}: those of the tokenizer; caches have ")


def test_tokens_that_merge_across_the_end_of_a_chunk_are_those_of_transformers() -> None:
    """A full stop that ends a chunk and the line break after it become one token."""
    plain = byte_tokenizer(bos=True)
    vocabulary = plain.get_vocab() | {".Ċ": len(plain.get_vocab())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(".", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = plain.backend_tokenizer.decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|end|>"
    )
    hf = hf_model("llama", vocab_size=len(vocabulary) + 1)
    checks = examined(Model(hf, tokenizer, "merging"), "tokens")
    assert checks["tokens"].ok and all(checks[name].ok for name in EXACT)
    # all but the full stops at the ends; within a chunk they merge in its cache too
    n_context = sum(len(chunk.replace(".\n", ".")) - 1 for chunk in CHUNKS)
    assert f" {n_context} of " in checks["tokens"].detail
    assert {chunk[-1] for chunk in CHUNKS} == {"."}


def biased(size: float) -> Model:
    """A Qwen2 whose keys hold a constant of about ``size``, as those of Qwen2.5 do."""
    hf = hf_model("qwen2", initializer_range=0.1)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=size)
    return Model(hf, byte_tokenizer(bos=False), "biased")


def test_a_large_constant_in_keys_is_fine_in_4_bits() -> None:
    checks = examined(biased(20.0), "store_bits")
    assert not checks["store_bits"].is_warning
    assert checks["store_bits"].detail.startswith("take 4, the default: ")


def test_a_change_that_is_not_negligible_is_a_warning() -> None:
    model = tiny_model("qwen2")
    bits = examined(model, "store_bits")["store_bits"]
    assert bits.ok and bits.is_warning and "4 bits change first tokens" in bits.detail
    assert str(bits.to_row()["detail"]).startswith("warning: ")


@pytest.mark.parametrize(
    ("limit", "advised", "warns"), [(1e9, 4, False), (1e-2, 8, True), (0.0, 16, True)]
)
def test_the_fewest_bits_that_change_little_are_advised(
    monkeypatch: pytest.MonkeyPatch, limit: float, advised: int, warns: bool
) -> None:
    monkeypatch.setattr(doctor, "NEGLIGIBLE_KL", limit)
    check, bits = doctor.bits_advice(tiny_model("qwen2"))
    assert check.name == "store_bits" and bits == advised
    assert check.ok and check.is_warning == warns
    assert re.search(rf"take (store_bits=)?{advised}\b", check.detail)


def test_values_that_no_scale_holds_are_a_warning() -> None:
    hf = hf_model("llama")
    with torch.no_grad():
        hf.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    checks = examined(Model(hf, byte_tokenizer(bos=True), "large"), "store_bits")
    detail = checks["store_bits"].detail
    assert detail.startswith("take store_bits=16")
    assert detail.count("give store_bits=16") == 2  # for 8 bits, and for 4


def a_cost(**changes: float) -> CostModel:
    costs = {"layer_s": 1e-4, "token_s": 1e-5, "pair_s": 1e-9, "entry_s": 1e-7, "read_s": 0.0}
    return CostModel(**(costs | changes))


@pytest.mark.parametrize("layer_s", [1e-4, 3e-3, 2e-2])
def test_the_smallest_context_of_reuse_is_what_auto_does(
    monkeypatch: pytest.MonkeyPatch, layer_s: float
) -> None:
    model, costs = tiny_model("qwen2"), a_cost(layer_s=layer_s)
    monkeypatch.setattr(Engine, "calibrate", lambda engine: costs)
    detail = doctor.speed_advice(Engine(model)).detail
    found = re.search(r"below contexts of (\d+) tokens", detail)
    assert found is not None, detail
    smallest = int(found[1])
    store = MemoryStore()
    keep_costs(model, store, costs)
    engine = Engine(model, store, prefix_bytes=0)
    for n_context, ran in ((smallest, "epic"), (smallest - 1, "recompute")):
        letters = "".join(random.Random(n_context).choices("abcdefghijklm", k=n_context))
        chunks = [letters[i : i + CHUNK_TOKENS] for i in range(0, n_context, CHUNK_TOKENS)]
        if len(chunks[-1]) < MIN_RUN:  # it would be text: cut the last two elsewhere
            last = chunks[-2] + chunks[-1]
            chunks[-2:] = [last[:-MIN_RUN], last[-MIN_RUN:]]
        engine.cache_chunks(chunks)
        prompt = "".join(chunks) + "?" * QUESTION_TOKENS
        report = engine.generate(prompt, chunks, max_new_tokens=1).report
        assert (report.context_tokens, report.ran) == (n_context, ran)


def test_full_prefill_may_always_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "calibrate", lambda engine: a_cost(entry_s=1.0))
    detail = doctor.speed_advice(Engine(tiny_model())).detail
    assert "faster up to contexts of 4064 tokens" in detail


def test_what_passes_cost_is_kept_where_it_is_told_to(tmp_path: Path) -> None:
    model, store = tiny_model(), ChunkStore(tmp_path / "kv")
    speed = next(check for check in examine(model, store) if check.name == "speed")
    assert speed.detail.endswith(f"kept in {tmp_path / 'kv'}")
    assert store.note(name_of(model)) is not None
    assert Engine(model, ChunkStore(tmp_path / "kv")).costs == kept_costs(model, store)
    assert store.stats().n_chunks == 0
    assert examined(model)["speed"].detail.endswith("not kept: give --dir for that")

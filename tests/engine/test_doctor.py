"""The doctor passes every supported family, and notices each kind of mistake that it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.engine import doctor
from samkv_integrations.engine import prefill as ingest
from samkv_integrations.engine.costs import kept_costs, name_of
from samkv_integrations.engine.doctor import CHUNKS, Check, examine
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


def test_what_passes_cost_is_kept_where_it_is_told_to(tmp_path: Path) -> None:
    model, store = tiny_model(), ChunkStore(tmp_path / "kv")
    speed = next(check for check in examine(model, store) if check.name == "speed")
    assert speed.detail.endswith(f"kept in {tmp_path / 'kv'}")
    assert store.note(name_of(model)) is not None
    assert Engine(model, ChunkStore(tmp_path / "kv")).costs == kept_costs(model, store)
    assert store.stats().n_chunks == 0
    assert examined(model)["speed"].detail.endswith("not kept: give --dir for that")

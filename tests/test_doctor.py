"""The doctor passes every supported family, and notices each kind of mistake that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from samkv_integrations import blend, ingest
from samkv_integrations import doctor as doctor_module
from samkv_integrations.doctor import CHUNKS, Check, examine
from samkv_integrations.errors import UnsupportedModel
from samkv_integrations.model import Model, Sampler
from tests.models import FAMILIES, SHAPE, byte_tokenizer, hf_model, tiny_model

EXACT = ("full prefill", "prefix reuse", "key rotation", "greedy decoding")


def examined(model: Model) -> dict[str, Check]:
    return {check.name: check for check in examine(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_passes(family: str, dtype: torch.dtype) -> None:
    checks = examined(tiny_model(family, dtype))
    assert [name for name, check in checks.items() if not check.ok] == []
    assert set(EXACT) < set(checks)
    assert not any(check.is_warning for check in checks.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_built_in_model_passes(dtype: str) -> None:
    checks = examined(Model.load("builtin", dtype=dtype))
    assert all(check.ok and not check.is_warning for check in checks.values()), checks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_stored_at_a_position_are_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(ingest, "unrotate", lambda x, cos, sin: x)
    checks = examined(tiny_model("llama", dtype))
    assert not checks["prefix reuse"].ok
    assert checks["full prefill"].ok  # it reads no cached key: the check above is the one needed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_pairing_of_rotated_channels_is_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates channels (0, 1), (2, 3), ... together, as some models do."""
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)

    monkeypatch.setattr(doctor_module, "rotate", neighbours)
    assert not examined(tiny_model("llama", dtype))["key rotation"].ok


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = blend.attention
    monkeypatch.setattr(
        blend,
        "attention",
        lambda query, key, value, scaling, mask, causal: original(
            query, key, value, scaling, mask, causal=False
        ),
    )
    checks = examined(tiny_model())
    assert not checks["full prefill"].ok and not checks["greedy decoding"].ok


@pytest.mark.parametrize("is_tie", [True, False])
def test_another_greedy_token_is_a_warning_only_in_a_tie(
    monkeypatch: pytest.MonkeyPatch, is_tie: bool
) -> None:
    hf, tokenizer = hf_model("llama"), byte_tokenizer(bos=True)
    right, other = tokenizer.convert_tokens_to_ids(["a", "b"])
    with torch.no_grad():  # `right` wins at every step, and `other` is as good or clearly worse
        hf.lm_head.weight[[right, other]] = 0.0
        hf.lm_head.bias = torch.nn.Parameter(torch.zeros(SHAPE["vocab_size"]))
        hf.lm_head.bias[right] = 100.0
        hf.lm_head.bias[other] = 100.0 if is_tie else 50.0
    monkeypatch.setattr(Sampler, "next", lambda self, logits: other)
    check = examined(Model(hf, tokenizer, "tied"))["greedy decoding"]
    assert (check.ok, check.is_warning) == (is_tie, is_tie)
    assert "after 0 tokens" in check.detail


def test_a_template_with_two_bos_fails() -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    check = examined(Model(hf_model("llama"), tokenizer, "two-bos"))["chat template"]
    assert not check.ok and "BOS twice" in check.detail


def test_a_template_without_bos_passes_because_the_engine_adds_it() -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = tokenizer.chat_template.removeprefix("{{ bos_token }}")
    check = examined(Model(hf_model("llama"), tokenizer, "no-bos"))["chat template"]
    assert check.ok and "the engine adds it" in check.detail


def test_a_tokenizer_without_template_passes() -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = None
    check = examined(Model(hf_model("llama"), tokenizer, "plain"))["chat template"]
    assert check.ok and "plain prompts only" in check.detail


def test_tokens_that_merge_across_a_boundary_are_a_warning() -> None:
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
    check = examined(Model(hf, tokenizer, "merging"))["token boundaries"]
    assert check.ok and check.is_warning
    assert str(check.to_row()["detail"]).startswith("warning: ")
    assert CHUNKS[0][-1] == "."


def _save(folder: Path, config: GPT2Config | LlamaConfig) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'gpt2'.*supported: llama"):
        Model.load(_save(tmp_path, GPT2Config()))


def test_yarn_is_refused_with_the_reason(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    config = LlamaConfig(rope_parameters=rope, **SHAPE)
    with pytest.raises(UnsupportedModel, match="'yarn'.*scales attention"):
        Model.load(_save(tmp_path, config))

"""The doctor notices each kind of mistake that it is for."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from samkv_integrations.lab import doctor
from samkv_integrations.lab.doctor import CHUNKS, Check, examine
from samkv_integrations.prompt.quoting import RenderedPrompt
from samkv_integrations.runtimes.transformers.model.attention import attention
from samkv_integrations.runtimes.transformers.passes import prefill as ingest
from samkv_integrations.runtimes.transformers.runtime import Model
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_stored_at_a_position_are_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(ingest, "unrotate", lambda x, cos, sin: x)
    checks = examined(tiny_model("llama", dtype), "prefix reuse")
    assert not checks["prefix reuse"].ok
    assert checks["full prefill and decoding"].ok  # which reads no cached key


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
        lambda layer, query, key, value, scaling, mask, causal, **options: attention(
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
    assert not check.ok and check.detail == "plain prompt and chat: unlike those of the tokenizer"


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

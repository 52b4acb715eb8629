"""Tiny seeded models of every supported family, built from their config; nothing is downloaded."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.llama_cpp import of_transformers
from tests.support.tested_runtime import ON_LLAMA_CPP

FAMILIES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3")
"""Layers that attend to everything, and rotate whole heads: laws of methods run over these."""

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0,
        "original_max_position_embeddings": 512}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
             "original_max_position_embeddings": 2048, "factor": 2.0,
             "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_CAPPED = {"sliding_window": 48, "layer_types": _MIXED, "query_pre_attn_scalar": 16,
           "final_logit_softcapping": 20.0}  # fmt: skip

_IMAGES = {"mm_tokens_per_image": 1, "vision_config": {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 14, "patch_size": 14,
}}  # fmt: skip

OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral, window": ("mistral", {"sliding_window": 48}),
    "qwen2, some windows": (
        "qwen2", {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 2}
    ),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": 48}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    }),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, longrope": ("phi3", {
        "sliding_window": None, "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 2048,
    }),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "gemma2": ("gemma2", {**_CAPPED, "attn_logit_softcapping": 5.0}),
    "gemma3_text": ("gemma3_text", {
        **_CAPPED, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }),
    "gemma3, images": ("gemma3", {}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 4.0}),
    "cohere2": ("cohere2", {
        "sliding_window": 48, "layer_types": _MIXED, "logit_scale": 4.0
    }),
    "gpt_oss": ("gpt_oss", {
        **_EXPERTS, "sliding_window": 48, "layer_types": _MIXED, "rope_parameters": YARN
    }),
}  # fmt: skip
"""Further ones: name -> model type and what its config has beside `SHAPE`."""

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def byte_tokenizer(*, bos: bool) -> PreTrainedTokenizerFast:
    """One token a byte, so that no two neighbours ever merge."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos:  # added to texts, as Llama's tokenizers do
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        **({"bos_token": "<|bos|>"} if bos else {}),
    )
    tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + TEMPLATE
    return tokenizer


SHAPE = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # large enough that attention is far from uniform, so that a wrong entry shows
    "initializer_range": 0.2,
}


def hf_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape: dict[str, Any] = SHAPE | changes
    if family in OTHER_FAMILIES:
        kind, more = OTHER_FAMILIES[family]
        auto: Any = AutoModelForCausalLM
        config = SHAPE | more | changes
        if kind == "gemma3":
            of_text = SHAPE | OTHER_FAMILIES["gemma3_text"][1] | changes
            config = {"text_config": of_text, **_IMAGES}
        hf = auto.from_config(AutoConfig.for_model(kind, **copy.deepcopy(config)))
        for name, weight in hf.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(weight)  # far from nothing
        return hf
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    if family == "llama3-rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **shape))
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(sliding_window=None, **shape))
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    raise ValueError(family)


def save_model(hf: PreTrainedModel, folder: Path) -> Path:
    """``folder``, with the model and a tokenizer, as `load_model` takes it."""
    hf.save_pretrained(folder)
    byte_tokenizer(bos=True).save_pretrained(folder)
    return folder


def saved_tiny(folder: Path) -> str:
    """``folder``, with a tiny model that any process can load by that name."""
    return str(save_model(hf_model("llama", max_position_embeddings=2048), folder))


@cache
def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """A tiny model; Qwen families have no BOS, as in their real tokenizers."""
    bos = not family.startswith("qwen")
    if ON_LLAMA_CPP:
        return of_transformers(hf_model(family, seed), byte_tokenizer(bos=bos), f"tiny-{family}")
    return Model(hf_model(family, seed).to(dtype), byte_tokenizer(bos=bos), f"tiny-{family}")


def liking(hf: PreTrainedModel, tokens: list[int]) -> PreTrainedModel:
    """``hf``, which draws ``tokens`` more often than others."""
    bias = torch.zeros(hf.config.vocab_size)
    bias[tokens] = 4.0
    hf.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return hf


@cache
def quoting_model() -> Model:
    """A tiny model that likes quotes, so that strings do not go on for a hundred letters."""
    tokenizer = byte_tokenizer(bos=True)
    hf = liking(hf_model("llama"), [tokenizer.convert_tokens_to_ids('"')])
    if ON_LLAMA_CPP:
        return of_transformers(hf, tokenizer, "tiny-quoting")
    return Model(hf, tokenizer, "tiny-quoting")


def turned(x: Tensor, position: int, model: Model) -> Tensor:
    """(heads, D) rotated to ``position``, by the cos and sin of transformers."""
    cos, sin = model.hf.model.rotary_emb(torch.empty(0), torch.tensor([[position]]))
    half = x.shape[-1] // 2
    c, s = cos[0, 0, :half], sin[0, 0, :half]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

"""Tiny models written as GGUF files, by the gguf package alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models import byte_tokenizer, hf_model

MERGES = ["t h", "th e", "Ġ the"]
"""Of the tokenizer, which else has one token a byte."""

ARCHITECTURE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def model_for_gguf(family: str, **changes: object) -> PreTrainedModel:
    """A tiny model that knows the tokens of the tokenizer that is written beside it."""
    return hf_model(family, vocab_size=262 + len(MERGES), **changes)


def write_gguf(
    path: Path,
    hf: PreTrainedModel,
    *,
    architecture: str | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    without: str | None = None,
    parts_of: int = 0,
) -> Path:
    """Write a model of `model_for_gguf` and its tokenizer.

    kind: how matrices are stored. extra: more metadata, a string or a float each; tensors: more of
    those. without: a tensor to leave out. parts_of: tensors of each part, if it is to be split.
    """
    config: Any = hf.config
    name = architecture or ARCHITECTURE[config.model_type]
    file = gguf.GGUFWriter(path, name, split_max_tensors=parts_of)
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_key_length(config.head_dim)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_vocab_size(config.vocab_size)
    if name == "llama":
        file.add_rope_dimension_count(config.head_dim)
    add_tokenizer(file)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            file.add_string(key, value)
        else:
            file.add_float32(key, value)
    names = gguf.get_tensor_name_map(
        {each: arch for arch, each in gguf.MODEL_ARCH_NAMES.items()}[
            ARCHITECTURE[config.model_type]
        ],
        config.num_hidden_layers,
    )
    for key, weight in hf.state_dict().items():
        stem, suffix = key.rsplit(".", 1)
        here = f"{names.get_name(stem)}.{suffix}"
        if here == without or (here == "output.weight" and config.tie_word_embeddings):
            continue
        if name == "llama" and (".attn_q." in here or ".attn_k." in here):
            is_query = ".attn_q." in here
            n_heads = config.num_attention_heads if is_query else config.num_key_value_heads
            halves = weight.reshape(n_heads, 2, -1, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        values = quantize(weight.float().numpy(), stored)
        file.add_tensor(here, values, raw_dtype=stored)
    for key, weight in (tensors or {}).items():
        file.add_tensor(key, weight.numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def add_tokenizer(file: gguf.GGUFWriter) -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens += [merge.replace(" ", "") for merge in MERGES]
    is_special = [token in tokenizer.all_special_tokens for token in tokens]
    file.add_tokenizer_model("gpt2")
    file.add_token_list(tokens)
    file.add_token_types([3 if special else 1 for special in is_special])
    file.add_token_merges(MERGES)
    file.add_bos_token_id(tokenizer.bos_token_id)
    file.add_eos_token_id(tokenizer.eos_token_id)
    file.add_pad_token_id(tokenizer.pad_token_id)
    file.add_add_bos_token(False)
    file.add_chat_template(tokenizer.chat_template)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)

"""Tiny models written as GGUF files, by the gguf package alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.models import byte_tokenizer, hf_model

MERGES = ["t h", "th e", "Ġ the"]
"""Of the tokenizer, which else has one token a byte."""

NEVER = ["Ā Ā"]
"""Merges that no text has: two bytes of zeros. llama.cpp wants one at least."""

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Kinds of tokens."""

ARCHITECTURE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def model_for_gguf(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny model that knows the tokens of the tokenizer that is written beside it."""
    return hf_model(family, seed, **{"vocab_size": 262 + len(MERGES), **changes})


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
    tokenizer: PreTrainedTokenizerFast | None = None,
    merges: Sequence[str] = MERGES,
) -> Path:
    """Write a model of `model_for_gguf` and its tokenizer.

    tokenizer, merges: see `add_tokenizer`. kind: how matrices are stored. extra: more metadata,
    a string or a float each; tensors: more of those. without: a tensor to leave out. parts_of:
    tensors of each part, if it is to be split.
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
    add_tokenizer(file, tokenizer, merges, config.vocab_size)
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


def add_tokenizer(
    file: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast | None = None,
    merges: Sequence[str] = MERGES, n_tokens: int = 0,
) -> None:  # fmt: skip
    """merges: of the file, whose tokens ``tokenizer`` has, but for those of `MERGES`.

    n_tokens: of the vocabulary, if there are fewer; the last ones are unused.
    tokenizer: None for one that has a token for each byte, and adds no special token to texts.
    """
    adds_bos = tokenizer is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    tokenizer = tokenizer or byte_tokenizer(bos=True)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    if merges is MERGES:
        tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<|unused {number}|>" for number in range(len(tokens), n_tokens)]
    is_special = [token in tokenizer.all_special_tokens for token in tokens]
    file.add_tokenizer_model("gpt2")
    if adds_bos:
        file.add_tokenizer_pre("gpt-2")
    kinds = [CONTROL if special else NORMAL for special in is_special]
    for index in _whole_words(tokenizer):
        tokens[index], kinds[index] = tokenizer.decode([index]), USER_DEFINED
    file.add_token_list(tokens)
    file.add_token_types(kinds)
    file.add_token_merges(merges)
    if tokenizer.bos_token_id is not None:
        file.add_bos_token_id(tokenizer.bos_token_id)
    file.add_eos_token_id(tokenizer.eos_token_id)
    file.add_pad_token_id(tokenizer.pad_token_id)
    file.add_add_bos_token(adds_bos)
    file.add_chat_template(tokenizer.chat_template)


def without_bias(hf: PreTrainedModel) -> PreTrainedModel:
    """``hf``, or another model that draws the tokens that ``hf`` likes nearly as often.

    llama.cpp knows no bias of a Llama's logits. So the first number of each hidden state is a
    constant that no layer reads or changes, and the bias is its weight in the logits.
    """
    if hf.lm_head.bias is None:
        return hf
    hf = copy.deepcopy(hf)
    constant = hf.config.hidden_size**0.5
    with torch.no_grad():
        hf.model.embed_tokens.weight[:, 0] = constant
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
            layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0.0
        hf.lm_head.weight[:, 0] = hf.lm_head.bias * 3 / constant  # norms make it small
    hf.lm_head.bias = None
    return hf


def _whole_words(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that are looked up in the vocabulary, as no merges make them.

    In a GGUF file they are found as tokens that a user has added, within words too: so short ones
    are not among them.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merged = {"".join(merge) for merge in model["merges"]}
    special = tokenizer.all_special_tokens
    return [
        index for token, index in model["vocab"].items()
        if len(token) > 3 and token not in merged and token not in special
    ]  # fmt: skip


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)

"""A decoder layer for the few tokens of a step, in as few operations as it takes.

With packed weights, half of a step's time would be transformers' modules and small operations. The
numbers are those of the modules with packed products, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.model.attention import Attend
from samkv_integrations.model.packed_weights import PackedLinear

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers are computed so."""


def has_packed_layers(config: Any, layers: Any) -> bool:  # noqa: ANN401
    """Whether `packed_layer` can compute all of a model's layers."""
    return (
        config.model_type in _FAMILIES
        and config.hidden_act == "silu"
        and all(
            isinstance(linear, PackedLinear)
            for layer in layers
            for linear in (
                layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj,
                layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj,
            )
        )
    )  # fmt: skip


def packed_layer(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:  # noqa: ANN401
    """A layer over hidden (1, R, hidden), with packed weights.

    cos, sin: (R, D) of the tokens' positions. attend: gets queries, keys and values.
    """
    attention, mlp = layer.self_attn, layer.mlp
    n_rows, size = hidden.shape[1], cos.shape[-1]
    rows: Tensor = hidden[0]
    normed = _normed(layer.input_layernorm, rows)
    query = attention.q_proj.packed_product(normed).view(n_rows, -1, size)
    key = attention.k_proj.packed_product(normed).view(n_rows, -1, size)
    value = attention.v_proj.packed_product(normed).view(n_rows, -1, size)
    if hasattr(attention, "q_norm"):
        query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
    n_heads = query.shape[1]
    turned = torch.cat((query, key), 1)
    turning_sin = torch.cat((-sin[:, : size // 2], sin[:, size // 2 :]), 1)
    turned = turned * cos[:, None] + turned.roll(size // 2, -1) * turning_sin[:, None]
    turned, value = turned.transpose(0, 1)[None], value.transpose(0, 1)[None]
    output = attend(
        attention.layer_idx, turned[:, :n_heads], turned[:, n_heads:], value, attention.scaling
    )
    output = output[0].transpose(0, 1).reshape(n_rows, -1)
    rows = rows + attention.o_proj.packed_product(output)
    normed = _normed(layer.post_attention_layernorm, rows)
    gate = F.silu(mlp.gate_proj.packed_product(normed))
    rows = rows + mlp.down_proj.packed_product(gate * mlp.up_proj.packed_product(normed))
    rows = rows[None]
    return rows


def _normed(norm: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

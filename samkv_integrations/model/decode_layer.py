"""A decoder layer for the few tokens of a step, in as few operations as it takes.

With packed weights, half of a step's time would be transformers' modules and small operations. The
numbers are those of the modules with packed products, to the last bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.model.attention import Attend
from samkv_integrations.model.packed_weights import JoinedLinears, PackedLinear

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers are computed so."""


class PackedLayer:
    """A decoder layer whose linear layers are packed."""

    def __init__(self, layer: Any) -> None:  # noqa: ANN401
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._qkv = JoinedLinears([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = JoinedLinears([mlp.gate_proj, mlp.up_proj])
        self._n_queries, self._n_keys = attention.q_proj.out_features, attention.k_proj.out_features

    @classmethod
    def of_all(cls, config: Any, layers: Any) -> list[PackedLayer]:  # noqa: ANN401
        """Those of a model; none if it has other layers."""
        is_one = (
            config.model_type in _FAMILIES
            and config.hidden_act == "silu"
            and all(
                isinstance(linear, PackedLinear)
                for layer in layers
                for part in (layer.self_attn, layer.mlp)
                for name, linear in part.named_children() if name.endswith("_proj")
            )
        )  # fmt: skip
        return [cls(layer) for layer in layers] if is_one else []

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run it over hidden (1, R, hidden).

        cos, sin: (R, D) of the tokens' positions. attend: gets queries, keys and values.
        """
        attention, mlp = self._layer.self_attn, self._layer.mlp
        n_rows, size = hidden.shape[1], cos.shape[-1]
        rows: Tensor = hidden[0]
        heads = self._qkv.product(_normed(self._layer.input_layernorm, rows)).view(n_rows, -1, size)
        n_heads, n_rotated = self._n_queries // size, (self._n_queries + self._n_keys) // size
        turned, value = heads[:, :n_rotated], heads[:, n_rotated:]
        if hasattr(attention, "q_norm"):
            query = _normed(attention.q_norm, turned[:, :n_heads])
            turned = torch.cat((query, _normed(attention.k_norm, turned[:, n_heads:])), 1)
        cos, sin = _turning(cos, sin)
        turned = turned * cos + turned.roll(size // 2, -1) * sin
        turned, value = turned.transpose(0, 1)[None], value.transpose(0, 1)[None]
        output = attend(
            attention.layer_idx, turned[:, :n_heads], turned[:, n_heads:], value, attention.scaling
        )
        output = output[0].transpose(0, 1).reshape(n_rows, -1)
        rows = rows + attention.o_proj.packed_product(output)
        normed = _normed(self._layer.post_attention_layernorm, rows)
        gate, up = self._gate_up.product(normed).chunk(2, 1)
        rows = rows + mlp.down_proj.packed_product(F.silu(gate) * up)
        return rows[None]


@lru_cache(maxsize=1)
def _turning(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 1, D) what heads, and heads with exchanged halves, are multiplied by in all layers."""
    half = cos.shape[-1] // 2
    return cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), 1)[:, None]


def _normed(norm: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    """RMS norm as the layer norm of (x, -x), whose mean is 0.

    PyTorch has a kernel for layer norm on CPUs; its RMS norm is six operations.
    """
    both, size = torch.cat((x, -x), -1), x.shape[-1]
    normed = F.layer_norm(both, (2 * size,), eps=norm.variance_epsilon)[..., :size]
    weight: Tensor = norm.weight
    return weight * normed

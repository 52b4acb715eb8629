"""A decoder layer in as few operations as possible.

transformers' modules take twice the operations. On a CPU the results equal those of the modules to
the last bit.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from samkv_integrations.runtimes.transformers.model.attention import Attend
from samkv_integrations.runtimes.transformers.model.threads import on_all_threads

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers `run` computes."""


def is_plain(config: Any, layer: Any) -> bool:  # noqa: ANN401
    """Whether `run` computes what the layer does: nobody has replaced, wrapped or hooked a part."""
    if config.model_type not in _FAMILIES or type(layer.mlp.act_fn) is not _silu():
        return False
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    parts: list[nn.Module] = [layer]
    for part in parts:
        is_hooked = part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        kind: Any = type(part)
        if is_hooked or not _is_known(kind):
            return False
        parts += part.children()
    return True


@cache
def _silu() -> type[nn.Module]:
    return type(ACT2FN["silu"])


@cache
def _is_known(kind: Any) -> bool:  # noqa: ANN401
    if issubclass(kind, nn.Linear):
        return kind.__module__.partition(".")[0] in _ROOTS
    kinds = ("transformers.models.", "gptqmodel.")  # gptqmodel for AWQ and GPTQ
    return kind.__module__.startswith(kinds) or kind is _silu()


_ROOTS = ("torch", "bitsandbytes", "torchao")


def run(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:  # noqa: ANN401
    """Run a decoder layer over hidden (1, R, hidden).

    cos, sin: (R, D) of the tokens' positions. attend: gets queries, keys and values.
    """
    attention, mlp = layer.self_attn, layer.mlp
    n_rows, size = hidden.shape[1], cos.shape[-1]
    rows: Tensor = hidden[0]
    normed = _normed(layer.input_layernorm, rows)
    cos, sin = _turning(cos, sin)
    of_heads = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (_product(linear, normed).view(n_rows, -1, size) for linear in of_heads)
    if hasattr(attention, "q_norm"):
        query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
    if query.is_cuda:
        n_heads = query.shape[1]
        turned = _turned(torch.cat((query, key), 1), cos, sin)
        query, key = turned[:, :n_heads], turned[:, n_heads:]
    else:  # copies of both would not fit a CPU's cache
        query, key = _turned(query, cos, sin), _turned(key, cos, sin)
    query, key, value = (side.transpose(0, 1)[None] for side in (query, key, value))
    output = attend(attention.layer_idx, query, key, value, attention.scaling)
    if output is None:
        return hidden
    output = output[0].transpose(0, 1).reshape(n_rows, -1)
    rows = rows + _product(attention.o_proj, output)
    normed = _normed(layer.post_attention_layernorm, rows)
    gate = _product(mlp.gate_proj, normed)
    F.silu(gate, inplace=True)  # in place, while the numbers are in a CPU's cache
    gate.mul_(_product(mlp.up_proj, normed))
    return (rows + _product(mlp.down_proj, gate))[None]


def _product(linear: Any, rows: Tensor) -> Tensor:  # noqa: ANN401
    """(R, n) -> (R, m)."""
    product: Tensor = on_all_threads(lambda: linear(rows[None]))  # AWQ needs two axes of tokens
    return product[0]


@lru_cache(maxsize=1)
def _turning(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 1, D) factors, the same in all layers, of heads and of heads with exchanged halves."""
    half = cos.shape[-1] // 2
    return cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), 1)[:, None]


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (R, heads, D) after RoPE. cos, sin: of `_turning`."""
    exchanged = heads.roll(heads.shape[-1] // 2, -1)
    if heads.is_cuda:  # one operation less, which rounds once less
        return torch.addcmul(heads * cos, exchanged, sin)
    return (heads * cos).add_(exchanged.mul_(sin))


def _normed(norm: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    shape, epsilon = norm.weight.shape, norm.variance_epsilon
    if x.is_cuda:  # one kernel, which rounds once where the module rounds twice
        return F.rms_norm(x, shape, norm.weight, epsilon)
    weight: Tensor = norm.weight
    normed = F.rms_norm(x, shape, None, epsilon)
    return normed.mul_(weight) if weight.dtype == x.dtype else normed * weight

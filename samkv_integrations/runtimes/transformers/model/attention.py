"""The attention function that decoder layers call; and linear layers over a single token.

No model code is patched. An attention function is registered under the name ``samkv``; a decoder
layer hands it the layer's queries, keys and values after RoPE, together with the ``attend``
callable of the pass in progress (prefill, probe, blend or decode), which travels as a keyword
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class Attend(Protocol):
    """What a pass does inside one attention layer."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        """Attention output of the R tokens that the pass computes, (batch, H, R, D).

        None to end the pass in a layer where `Model.ends_at` allows it.

        query (batch, H, R, D), key and value (batch, G, R, D): after RoPE, of these tokens only.
        The pass adds the keys and values of all other tokens.
        """
        ...


def _samkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **kwargs: Any,  # transformers' interface; passed on as it came
) -> tuple[Tensor, Tensor | None]:
    score_cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attend is None and (score_cap is not None or sinks is not None):
        causal = attention_mask is None and query.shape[2] > 1
        output = attention(
            query, key, value, scaling, attention_mask, causal, score_cap=score_cap, sinks=sinks
        )
        return output.transpose(1, 2), None
    if attend is None:  # the user calls the model directly: behave as transformers does
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = attend(layer, query, key, value, scaling)
    assert attended is not None, "transformers' layers run to their end"
    return attended.transpose(1, 2), None


def attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None, causal: bool,
    *, score_cap: float | None = None, sinks: Tensor | None = None, may_round: bool = False,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention of (batch, H, R, D) over (batch, G, S, D), grouped heads.

    mask: (R, S) or (batch, H, R, S): bool, True where a query sees a key, or numbers to add to the
        scores. Or the result of `of_groups`.
    score_cap: scores stay below it (Gemma 2, arXiv 2408.00118, section 2).
    sinks: (H,) for each head, a score in the softmax that belongs to no key (gpt-oss, arXiv
        2508.10925, section 2.2).
    may_round: whether scores may be rounded to bfloat16, where that is faster.
    """
    (n_batch, n_heads, n_rows, size), (n_kv_heads, n_keys) = query.shape, key.shape[1:3]
    is_compiled = query.device.type == "cpu" and query.dtype.itemsize == 2
    is_explicit = score_cap is not None or sinks is not None
    if may_round and mask is not None and n_rows >= _MANY_ROWS and is_compiled:
        is_explicit |= query.dtype == torch.bfloat16 and products_are_faster()
    more_rows, more_keys = _more(n_rows, n_keys, causal, is_explicit)
    if is_compiled and (more_rows or more_keys) and (is_explicit or n_rows >= _MANY_ROWS):
        query = F.pad(query, (0, 0, 0, more_rows))
        if more_keys:
            key, value = (F.pad(each, (0, 0, 0, more_keys)) for each in (key, value))
        if not causal:
            mask = query.new_ones(1, n_keys, dtype=torch.bool) if mask is None else mask
            is_bool = mask.dtype == torch.bool
            mask = F.pad(mask, (0, more_keys), value=False if is_bool else -torch.inf)
            if mask.shape[-2] > 1:  # a query that sees no key would give NaN
                mask = F.pad(mask, (0, 0, 0, more_rows), value=True if is_bool else 0.0)
        output = attention(
            query, key, value, scaling, mask, causal, score_cap=score_cap, sinks=sinks,
            may_round=may_round,
        )  # fmt: skip
        return output[:, :, :n_rows]
    if is_explicit:
        return _explicit_attention(query, key, value, scaling, mask, causal, score_cap, sinks)
    groups = n_heads // n_kv_heads
    # Neither a CPU's kernel for a single token nor CUDA's kernels with a mask support grouped
    # heads. So the heads of a group become queries of one head. Each key is then read once, not
    # once for each head, which is ten times as fast on CPUs (docs/decisions.md). On CUDA this pays
    # if the masks for all heads are smaller than keys and values for all heads would be.
    is_single = n_rows == 1 and not causal and query.device.type == "cpu"
    is_masked = mask is not None and query.is_cuda
    if groups > 1 and (is_single or (is_masked and _suits_groups(n_rows, groups, n_heads, size))):
        if mask is not None and mask.dim() == 2:
            mask = mask if len(mask) == groups * n_rows else mask.repeat(groups, 1)
        elif mask is not None:
            mask = mask.expand(n_batch, n_heads, n_rows, n_keys)
            mask = mask.reshape(n_batch, n_kv_heads, groups * n_rows, n_keys)
        if is_single and key.dtype.itemsize == 2:
            # The kernel waits for memory, because processors do not foresee the order in which it
            # reads. If the memory is read in sequence first, a step takes .94 to 1 of the time.
            for side in (key, value):
                side.view(torch.int32).amax()
        as_queries = query.reshape(n_batch, n_kv_heads, groups * n_rows, size)
        output = F.scaled_dot_product_attention(as_queries, key, value, mask, scale=scaling)
        return output.reshape(query.shape)
    if groups > 1 and is_masked:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        groups = 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )


def _suits_groups(n_rows: int, groups: int, n_heads: int, size: int) -> bool:
    return groups * n_rows <= 2 * n_heads * size


def of_groups(mask: Tensor, n_heads: int, n_kv_heads: int, size: int) -> Tensor:
    """The mask (R, S) as `attention` needs it on a device, for many layers: (H / G * R, S).

    Rows begin at multiples of 8 numbers, because PyTorch copies all other masks in every layer.
    """
    groups, n_keys = n_heads // n_kv_heads, mask.shape[1]
    if groups > 1 and mask.is_cuda and _suits_groups(len(mask), groups, n_heads, size):
        mask = mask.repeat(groups, 1)
    return F.pad(mask, (0, -n_keys % 8))[:, :n_keys] if mask.is_cuda else mask


_MANY_ROWS = 64
"""From this many rows on, a CPU's kernels for 16 bits are compiled for each shape."""


def _more(n_rows: int, n_keys: int, causal: bool, is_explicit: bool) -> tuple[int, int]:
    """Rows and keys of zeros to add to attention in 16 bits on CPUs, so that it has few shapes.

    PyTorch and oneDNN compile a program of .1 to 1.3 MB for each shape, and PyTorch keeps them all.
    """
    more_keys = -n_keys % (16 if causal and not is_explicit else 64)
    if causal:
        return (more_keys, more_keys) if n_rows == n_keys else (0, 0)
    return -n_rows % 16 if n_rows > 16 else 0, more_keys


_SCORES = 1 << 20
"""Scores per tile of explicit attention: a tile nearly fits a CPU's cache."""


@cache
def products_are_faster() -> bool:
    """Whether matrix products for scores beat a CPU's fused kernel, by a trial of .05 s.

    With a mask and in bfloat16, some processors take less than half the time for products. The
    fused kernel keeps scores in float32; products round them to bfloat16 (docs/decisions.md).
    """
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    query, key = torch.ones(1, 8, 128, 64, **kind), torch.ones(1, 2, 640, 64, **kind)
    mask = torch.zeros(128, 640, **kind)
    fused = partial(F.scaled_dot_product_attention, scale=0.125, enable_gqa=True)
    return is_faster(
        partial(_explicit_attention, query, key, key, 0.125, mask, False, None, None),
        partial(fused, query, key, key, mask),
    )


@torch.inference_mode()
def is_faster(one: Callable[[], Tensor], other: Callable[[], Tensor], by: float = 0.8) -> bool:
    """Whether ``one`` takes less than ``by`` of the time of ``other``: the best of four calls."""
    seconds: dict[Callable[[], Tensor], list[float]] = {one: [], other: []}
    for _ in range(4):
        for call, taken in seconds.items():
            start = perf_counter()
            call()
            taken.append(perf_counter() - start)
    return min(seconds[one]) < by * min(seconds[other])


def _explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None, causal: bool,
    score_cap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attention` for the cases that no kernel supports."""
    (n_batch, n_heads, n_rows, size), (n_kv_heads, n_keys) = query.shape, key.shape[1:3]
    tile = max(16, _SCORES // (n_batch * n_heads * n_keys) // 16 * 16)  # few shapes, see `_more`
    query, outputs = query * scaling, []
    for start in range(0, n_rows, tile):
        rows = slice(start, min(start + tile, n_rows))
        # The heads of a group become queries of their key-value head, which is not copied.
        grouped = query[:, :, rows].reshape(n_batch, n_kv_heads, -1, size)
        scores = (grouped @ key.mT).view(n_batch, n_heads, -1, n_keys)
        if score_cap is not None:
            scores = torch.tanh(scores / score_cap) * score_cap
        seen = mask
        if causal:
            at = torch.arange(n_rows, device=query.device)[rows, None]
            seen = torch.arange(n_keys, device=query.device)[None] <= at
        elif mask is not None and mask.shape[-2] > 1:
            seen = mask[..., rows, :]
        if seen is not None and seen.dtype == torch.bool:
            scores.masked_fill_(~seen, -torch.inf)
        elif seen is not None:
            scores.add_(seen)
        if sinks is not None:
            sink = sinks.view(1, -1, 1, 1).expand(n_batch, -1, scores.shape[2], 1)
            scores = torch.cat((scores, sink.to(scores.dtype)), -1)
        weights = scores.softmax(-1)[..., :n_keys]  # sums are float32
        output = weights.reshape(n_batch, n_kv_heads, -1, n_keys) @ value
        outputs.append(output.view(n_batch, n_heads, -1, size))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


# -- steps of one answer ----------------------------------------------------------------------

_MANY_KEYS = 512


def attention_of_token(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, n_keys: int
) -> Tensor:
    """Attention of one token's query (1, H, 1, D) over the first ``n_keys`` of keys and values.

    keys, values: (G, S, D); tensors that are not contiguous would be copied. Values after
    ``n_keys`` must be finite. Matrix products compute it, which round scores to bfloat16. oneDNN
    compiles a program for each S, so callers should use few sizes.
    """
    n_kv_heads, _, size = keys.shape
    grouped = query.reshape(n_kv_heads, -1, size) * scaling
    scores = torch.bmm(grouped, keys.mT)
    scores[..., n_keys:] = -torch.inf
    return torch.bmm(scores.softmax(-1), values).view(query.shape)


def suits_products(query: Tensor, n_keys: int) -> bool:
    """Whether `attention_of_token` beats `attention`; see docs/decisions.md."""
    is_suited = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    return is_suited and n_keys >= _MANY_KEYS and _are_faster_for_token()


@cache
def _are_faster_for_token() -> bool:
    """By a trial of some milliseconds."""
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    query, key = torch.ones(1, 8, 1, 64, **kind), torch.ones(1, 2, 4096, 64, **kind)
    return is_faster(
        partial(attention_of_token, query, key[0], key[0], 0.125, 4096),
        partial(attention, query, key, key, 0.125, None, False),
    )


_PARTS = 8  # more make no difference
_WIDEST = 2048  # inputs of a layer; above, MKL's product of a matrix and a vector is as fast


def for_single_token(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Inside this block, linear layers over one token are computed in the faster of two ways.

    One way is a batch of a few products (see `parts_are_faster`). Results differ in the last bits
    only. No module is changed.
    """
    is_float32 = device.type == "cpu" and dtype == torch.float32
    return InParts() if is_float32 and parts_are_faster() else nullcontext()


@cache
def parts_are_faster() -> bool:
    """Whether this processor reads float32 weights faster as `InParts`, by a trial of .1 s.

    With MKL, a product of a matrix and a vector takes .4 of the time in parts on AMD's processors,
    and twice the time on Intel's (docs/decisions.md).
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    weight, token = torch.ones(_TRIED // 1024, 1024, **kind), torch.ones(1, 1024, **kind)
    return is_faster(partial(_parts, token, weight), partial(F.linear, token, weight))


_TRIED = 2**24
"""Numbers of the trial's matrix: more than fit the caches of most processors."""


def _parts(x: Tensor, weight: Tensor) -> Tensor:
    parts = weight.view(_PARTS, -1, weight.shape[1])
    token = x.reshape(1, -1).t().expand(_PARTS, -1, 1)
    return torch.bmm(parts, token).view(*x.shape[:-1], -1)


class InParts(TorchFunctionMode):
    """Inside this block, linear layers over one token are a batch of a few products."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is not F.linear or kwargs:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        n_outputs, n_inputs = weight.shape
        is_suited = (
            type(weight) in (Tensor, torch.nn.Parameter)  # quantised ones have own products
            and x.numel() == n_inputs <= _WIDEST
            and n_outputs % _PARTS == 0
            and weight.is_contiguous()
            and x.dtype == weight.dtype
        )
        if not is_suited:
            return F.linear(x, weight, bias)
        product = _parts(x, weight)
        return product if bias is None else product + bias

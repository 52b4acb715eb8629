"""Rotary positions: rotate keys and queries to a position, and back to none.

Chunk caches hold keys without a position, so that one cache serves every place in every prompt.
The cos and sin are always those that the model itself uses, in the model's dtype; the arithmetic is
float32 and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (..., T, heads, D) to the positions of ``cos`` and ``sin`` (T, D).

    Same dtype as ``x``. Paper of the rotation: RoFormer, arXiv 2104.09864, equation 34.
    """
    return _turn(x.float(), cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin``, half by half, without a copy of ``x``."""
    turned, half = torch.empty_like(x), x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos[..., :half], out=turned[..., :half])
    turned[..., :half].addcmul_(second, sin[..., :half], value=-1)
    torch.mul(second, cos[..., half:], out=turned[..., half:])
    turned[..., half:].addcmul_(first, sin[..., half:])
    return turned


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, exact up to one rounding to the dtype of ``x``.

    In bfloat16 the model's rounded cos and sin no longer satisfy cos^2 + sin^2 = 1, so the inverse
    divides by that sum; without it every stored key would be off by up to 0.5 %.
    """
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    norm = cos.square() + sin.square()
    return (_turn(x.float(), cos, -sin) / norm).to(x.dtype)

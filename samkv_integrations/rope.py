"""Rotary positions: rotate keys and queries to a position, and back to none.

Chunk caches hold keys without a position, so that one cache serves every place in every prompt.
The cos and sin are always those that the model itself uses, in the model's dtype; the arithmetic is
float32 and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (..., T, heads, D) to the positions of ``cos`` and ``sin`` (T, D).

    Same dtype as ``x``. Paper of the rotation: RoFormer, arXiv 2104.09864, equation 34.
    """
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    wide = x.float()
    return (wide * cos + _rotate_half(wide) * sin).to(x.dtype)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, exact up to one rounding to the dtype of ``x``.

    In bfloat16 the model's rounded cos and sin no longer satisfy cos^2 + sin^2 = 1, so the inverse
    divides by that sum; without it every stored key would be off by up to 0.5 %.
    """
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    wide = x.float()
    norm = cos.square() + sin.square()
    return ((wide * cos - _rotate_half(wide) * sin) / norm).to(x.dtype)

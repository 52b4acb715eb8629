"""Tensors that tests compute with, and what is in them."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers, always the same ones for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sets(mask: Tensor) -> list[set[int]]:
    """The columns of each row in which the mask is True."""
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]

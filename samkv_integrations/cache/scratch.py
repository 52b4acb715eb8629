"""Tensors for what is computed on the way, written over and over by one thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch(threading.local):
    """Memory that a thread keeps for intermediate results, by name.

    On CPUs a large tensor that is made and dropped again and again may go back to the operating
    system each time, and every page of the next one is a page fault: more time than the arithmetic
    on it. On other devices PyTorch keeps such memory itself, and tensors are made anew.

    Each thread has its own. It ends with the thread.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of any content; on a CPU it lies where this thread's last one of the name lay."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        n_numbers, kept = math.prod(shape), self._kept.get((name, dtype))
        if kept is None or len(kept) < n_numbers:
            with torch.inference_mode(False):  # or it could be written in that mode only
                kept = self._kept[name, dtype] = torch.empty(n_numbers, dtype=dtype)
        return kept[:n_numbers].view(*shape)

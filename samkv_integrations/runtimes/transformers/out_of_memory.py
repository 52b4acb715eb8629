"""PyTorch's errors of a device without memory, as errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samkv_integrations.errors import OutOfMemory


@contextmanager
def told_of_memory(device: torch.device) -> Iterator[None]:
    """Inside this block, PyTorch's own out-of-memory error becomes OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory.on(device) from error

"""A device without memory, told by an error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samkv_integrations.errors import OutOfMemory


@contextmanager
def told_of_memory(device: torch.device) -> Iterator[None]:
    """Raise OutOfMemory where PyTorch's own error leaves the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory.on(device) from error

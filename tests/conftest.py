"""What all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The tensors are tiny, and threads that wait for each other on a busy machine cost more."""
    torch.set_num_threads(1)

"""Threads of a short pass: its products use all, its other operations one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from samkv_integrations.runtimes.transformers.model.threads import (
    on_all_threads,
    small_operations_on_one_thread,
)

SMALL, LARGE = torch.zeros(1, 8, 64), torch.zeros(1, 4096, 576)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_outside_of_a_short_pass_everything_uses_all_threads() -> None:
    assert on_all_threads(torch.get_num_threads) == 2
    with small_operations_on_one_thread(LARGE):
        assert torch.get_num_threads() == 2


def test_in_a_short_pass_products_alone_use_all_threads() -> None:
    with small_operations_on_one_thread(SMALL):
        few = torch.get_num_threads()
        # a layer of transformers, whose attention is ours
        assert on_all_threads(lambda: (on_all_threads(torch.get_num_threads), two())) == (2, 2)
        assert torch.get_num_threads() == few
    assert few in (1, 2)  # 2 where PyTorch has no OpenMP
    assert torch.get_num_threads() == 2


def two() -> int:
    return torch.get_num_threads()


def test_all_threads_are_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), small_operations_on_one_thread(SMALL):
        on_all_threads(lambda: 1 // 0)
    assert torch.get_num_threads() == 2


def test_a_thread_that_begins_to_compute_meanwhile_has_all_threads() -> None:
    found = list[int]()
    with small_operations_on_one_thread(SMALL):
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert found == [2]

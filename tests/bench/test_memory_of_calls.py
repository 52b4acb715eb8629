"""The memory of calls."""

from __future__ import annotations

import gc

import torch

from benchmarks import memory


def test_the_peak_of_known_allocations_is_exact() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(500, dtype=torch.float32)
        del first
        third = torch.empty(100, dtype=torch.float32)
        return second[:1] + third[:1]

    before = torch.empty(10_000)  # was alive before: no part of it
    assert memory.peak_of(call, torch.device("cpu")).tensor_bytes == 6000
    assert before.numel() == 10_000


def test_what_an_earlier_call_left_in_a_cycle_lowers_no_peak() -> None:
    """It did: such tensors are freed whenever Python looks for cycles, in a later call then."""

    class Cyclic:
        def __init__(self) -> None:
            self.itself, self.held = self, torch.empty(5000, dtype=torch.float32)

    def collects() -> None:
        gc.collect()
        torch.empty(1000, dtype=torch.float32)

    cpu = torch.device("cpu")
    assert memory.peak_of(Cyclic, cpu).tensor_bytes == 20_000
    assert memory.peak_of(collects, cpu).tensor_bytes == 4_000


def test_the_highest_sum_counts() -> None:
    assert memory.highest([]) == 0
    assert memory.highest([(1, 10), (4, 30), (2, 20), (3, -25), (5, -35)]) == 35
    assert memory.highest([(1, -10), (2, 20)]) == 10

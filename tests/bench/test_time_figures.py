"""What the benches of time compute from what they measure, by hand; and the memory of calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from benchmarks import latency, memory


def report(ttft_s: float, **changes: object) -> dict[str, Any]:
    fields = {"ttft_s": ttft_s, "load_s": 0.0, "decode_tokens_per_s": 10.0, "kept_ratio": 0.2,
              "recompute_ratio": 0.1, "context_tokens": 1000, "uncached_tokens": 60,
              "prompt_tokens": 1060, "bytes_read": 500, "kv_bytes": 300,
              "full_kv_bytes": 1200}  # fmt: skip
    return {**fields, **changes}


def test_ratios_are_medians_of_those_within_a_round() -> None:
    peaks = [[memory.Peak(tensor_bytes=n, python_bytes=1)] for n in (100, 25)]
    full = latency.Measured(
        reports=[report(s, recompute_ratio=1.0) for s in (1.0, 4.0, 2.0)],
        stored_shares=[1.0] * 3, peaks=peaks[0],
    )  # fmt: skip
    mine = latency.Measured(
        reports=[report(s, decode_tokens_per_s=30.0) for s in (0.5, 1.0, 1.6)],
        stored_shares=[1.0] * 3, peaks=peaks[1],
    )  # fmt: skip
    measured = {("recompute", 1): full, ("other", 1): mine}
    truth, row = latency.rows_of(measured, bf16_bytes_per_token=2, disk_bytes_per_s=1e3)
    assert (truth["ttft_s"], row["ttft_s"]) == (2.0, 1.0)
    assert row["ttft_ratio"] == 0.5  # of 0.5, 0.25 and 0.8
    assert (row["decode_ratio"], row["peak_ratio"], row["kv_ratio"]) == (3, 0.25, 0.25)
    assert row["bytes_ratio"] == 500 / (1060 * 2)
    assert row["arithmetic_floor_s"] == pytest.approx(160 * 2.0 / 1060)


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

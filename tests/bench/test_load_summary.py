"""The rows of a run of load, from records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.load import Block, Pace, Record
from benchmarks.load_summary import ratio_interval, rows_of

EIGHT = Pace(concurrency=8)


def record(index: int, ttft_s: float | None, **fields: Any) -> Record:
    given = {"label": "m", "index": index, "ttft_s": ttft_s, "completion_tokens": 3,
             "gaps_s": (0.1, 0.3), "total_s": 2.0}  # fmt: skip
    return Record(**{**given, **fields})


def block(label: str, *records: Record, pace: Pace = EIGHT, round: int = 0) -> Block:
    return Block(label=label, pace=pace, round=round, duration_s=4.0, records=records)


def failed(index: int, kind: str, message: str = "") -> Record:
    return record(index, None, error=kind, message=message, completion_tokens=2)


def test_a_ratio_is_resampled_in_pairs() -> None:
    """Apart, figures that differ this much would leave the ratio open."""
    bases = [float(n) for n in range(1, 41)]
    assert ratio_interval([base / 2 for base in bases], bases) == (0.5, 0.5)
    values = [base * (0.5 if n % 2 else 0.6) for n, base in enumerate(bases)]
    found = ratio_interval(values, bases)
    assert found is not None and 0.45 < found[0] < 0.55 < found[1] < 0.65
    assert ratio_interval([1.0, 1.0], [0.0, 1.0]) is None
    assert ratio_interval([1.0], [4.0]) == (0.25, 0.25)


def test_a_row_counts_what_was_answered_over_the_time_of_its_own_blocks() -> None:
    reports = [{"ran": "auto", "wait_s": 1.0}, {"ran": "auto", "wait_s": 2.0},
               {"ran": "recompute", "wait_s": 6.0}]  # fmt: skip
    (row,) = rows_of([
        block("auto", record(1, 1.0, report=reports[0], prompt_tokens=10, cached_tokens=8),
              failed(2, "429", "first")),
        block("auto", record(3, 3.0, report=reports[1], prompt_tokens=12, cached_tokens=8),
              record(4, 2.0, report=reports[2], gaps_s=(0.5, 0.7), total_s=5.0,
                     prompt_tokens=20, cached_tokens=0),
              failed(5, "429", "second"), failed(6, "cut", "gone"), round=1),
    ])  # fmt: skip
    assert (row["label"], row["concurrency"], row["rate"]) == ("auto", 8, None)
    assert (row["requests"], row["answered"]) == (6, 3)
    assert row["errors"] == {"429": 2, "cut": 1}
    assert row["error_messages"] == {"429": "first", "cut": "gone"}
    assert row["duration_s"] == 8.0
    assert row["requests_per_s"] == 3 / 8
    assert row["output_tokens_per_s"] == 3 * 3 / 8  # what failed answers said does not count
    assert (row["ttft_p50_s"], row["ttft_p90_s"]) == (2.0, pytest.approx(2.8))
    assert row["token_p50_s"] == pytest.approx(0.2)  # of (0.4, 0.4, 1.2) / 2
    assert row["token_p99_s"] == pytest.approx(0.6 - 0.02 * 0.4)
    assert row["gap_p50_s"] == pytest.approx(0.3)  # of 0.1, 0.3, 0.1, 0.3, 0.5, 0.7
    assert (row["total_p50_s"], row["total_p99_s"]) == (2.0, pytest.approx(4.94))
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (12, 8, 3)
    assert (row["wait_p50_s"], row["ran"]) == (2.0, {"auto": 2, "recompute": 1})
    assert row["ttft_ratio"] is None


def test_ratios_are_of_medians_over_the_prompts_that_both_answered() -> None:
    rows = rows_of([
        block("auto", record(1, 1.0), record(2, 2.0), record(3, 30.0), failed(4, "429")),
        block("recompute", record(1, 10.0), record(2, 10.0), failed(3, "cut"), record(4, 99.0)),
        block("recompute", record(7, 5.0), pace=Pace(concurrency=1)),
        block("auto", record(7, 4.0), pace=Pace(concurrency=1)),
    ])  # fmt: skip
    assert [(row["label"], row["concurrency"]) for row in rows] == [
        ("auto", 8), ("recompute", 8), ("recompute", 1), ("auto", 1),
    ]  # fmt: skip
    assert [row["ttft_ratio"] for row in rows] == pytest.approx([0.15, 1.0, 1.0, 0.8])
    low, high = rows[0]["ttft_ratio_low"], rows[0]["ttft_ratio_high"]
    assert (low, high) == pytest.approx((0.1, 0.2))  # both prompts the one, both the other
    assert (rows[3]["ttft_ratio_low"], rows[3]["ttft_ratio_high"]) == (0.8, 0.8)

"""The rows of ``samkv bench serve`` for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from samkv_integrations.bench.load_run import Pace
from samkv_integrations.cli import tables
from samkv_integrations.figures import Row, ratio, seconds


def load_table(rows: Sequence[Row]) -> Table:
    """A row for each label at each pace."""
    columns = (
        "method", "load", "answered", "requests\na second", "tokens\na second", "first\ntoken p50",
        "p90", "p99", "a token\np50", "p99", "of re-\ncompute",
    )  # fmt: skip
    cells = [
        (
            row["label"],
            _load(row),
            f"{row['answered']} of {row['requests']}",
            f"{row['requests_per_s']:.2f}",
            f"{row['output_tokens_per_s']:.1f}",
            *(_seconds(row[f"ttft_p{p}_s"]) for p in (50, 90, 99)),
            *(_seconds(row[f"token_p{p}_s"]) for p in (50, 99)),
            ratio(row["ttft_ratio"]),
        )
        for row in rows
    ]
    return tables.table(columns, cells, left=2, gap=1)


def load_lines(rows: Sequence[Row]) -> Iterator[str]:
    """What the table has no place for: intervals, what methods came to, queueing, and errors."""
    for row in rows:
        name = f"{row['label']}, {_load(row)}"
        if row["ttft_ratio_low"] is not None and row["ttft_ratio"] != 1:
            yield (
                f"{name}: median first token {row['ttft_ratio']:.3f} of recompute's "
                f"(95 %: {row['ttft_ratio_low']:.3f} to {row['ttft_ratio_high']:.3f})"
            )
        if row["ran"]:
            ways = ", ".join(f"{way} for {n}" for way, n in row["ran"].items())
            yield f"{name}: ran {ways}; waited {_seconds(row['wait_p50_s'])} (median)"
        for kind, n in row["errors"].items():
            yield f"{name}: {n} x {kind} ({row['error_messages'][kind]})"


def _load(row: Row) -> str:
    return str(Pace(concurrency=row["concurrency"], rate=row["rate"]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)

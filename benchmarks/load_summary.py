"""The records of a run of load as rows: a row for each label at each pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.commands import TRUTH
from benchmarks.load import Block, Pace, Record
from samkv_integrations.formatting import Row

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """numpy's: linear between the two nearest of the sorted values; None without values."""
    return float(np.percentile(values, percent)) if values else None


def rows_of(blocks: Sequence[Block]) -> list[Row]:
    """A row for each label at each pace, over all its rounds.

    Times are percentiles over the requests that were answered to their end: ``ttft_p50_s`` of the
    first token, ``token_p50_s`` of the seconds a token after it, ``gap_p50_s`` of the time between
    two texts of a stream, ``total_p50_s`` of the whole. Requests and output tokens a second are
    those of answered requests over the time of the label's own blocks, their ends included, in
    which the last requests have the server almost to themselves. ``wait_p50_s`` is what the
    server's reports say of queueing, ``ran`` what their methods came to.

    ``ttft_ratio`` is the median first token over that of `recompute` for the same prompts at the
    same pace, with a 95 % bootstrap interval over the prompts; None without `recompute`.
    """
    groups: dict[tuple[Pace, str], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.pace, block.label), []).append(block)
    return [
        {**_row(of_one), **_ratio(of_one, groups.get((pace, TRUTH), ()))}
        for (pace, _), of_one in groups.items()
    ]


def _row(blocks: Sequence[Block]) -> Row:
    records = [record for block in blocks for record in block.records]
    good = [record for record in records if record.error is None]
    seconds = sum(block.duration_s for block in blocks)
    errors = Counter(record.error for record in records if record.error)
    messages = {record.error: record.message for record in reversed(records) if record.error}
    reports = [record.report for record in good if record.report]
    row: dict[str, Any] = {
        "label": blocks[0].label,
        "concurrency": blocks[0].pace.concurrency,
        "rate": blocks[0].pace.rate,
        "requests": len(records),
        "answered": len(good),
        "errors": dict(sorted(errors.items())),
        "error_messages": messages,
        "duration_s": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": sum(record.completion_tokens for record in good) / seconds,
        "prompt_tokens": _median(record.prompt_tokens for record in good),
        "cached_tokens": _median(record.cached_tokens for record in good),
        "completion_tokens": _median(record.completion_tokens for record in good),
    }
    gaps = [gap for record in good for gap in record.gaps_s]
    for name, values in (
        ("ttft", _known(record.ttft_s for record in good)),
        ("token", _known(record.token_s for record in good)),
        ("gap", gaps),
        ("total", [record.total_s for record in good]),
    ):
        row |= {f"{name}_p{p}_s": percentile(values, p) for p in PERCENTILES}
    row["wait_p50_s"] = _median(report.get("wait_s") for report in reports)
    row["ran"] = dict(Counter(str(report["ran"]) for report in reports if "ran" in report))
    return row


def _ratio(mine: Sequence[Block], base: Sequence[Block]) -> Row:
    """First tokens over those of ``base``, over the prompts that both answered."""
    own, bases = _first_tokens(mine), _first_tokens(base)
    shared = sorted(own.keys() & bases.keys())
    if not shared:
        return dict.fromkeys(("ttft_ratio", "ttft_ratio_low", "ttft_ratio_high"))
    values, other = [own[n] for n in shared], [bases[n] for n in shared]
    low, high = ratio_interval(values, other) or (None, None)
    return {
        "ttft_ratio": float(np.median(values) / np.median(other)),
        "ttft_ratio_low": low,
        "ttft_ratio_high": high,
    }


def ratio_interval(values: Sequence[float], bases: Sequence[float]) -> tuple[float, float] | None:
    """95 % bootstrap interval of the ratio of two medians: 2,000 resamples, fixed seed.

    The two figures of a prompt are drawn together: what makes a prompt slow for both cancels. None
    if a base is 0, because a resample may hold nothing else.
    """
    if not all(bases):
        return None
    drawn = np.random.default_rng(0).integers(0, len(values), (2_000, len(values)))
    mine, theirs = (np.median(np.asarray(each)[drawn], axis=-1) for each in (values, bases))
    low, high = np.quantile(mine / theirs, (0.025, 0.975))
    return float(low), float(high)


def _first_tokens(blocks: Sequence[Block]) -> dict[int, float]:
    """Prompt -> seconds to the first token of its answer."""
    records: list[Record] = [record for block in blocks for record in block.records]
    return {r.index: r.ttft_s for r in records if r.error is None and r.ttft_s is not None}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    return percentile(_known(values), 50)

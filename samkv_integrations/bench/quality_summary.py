"""The rows of a quality run, summarised by label, kind and number of documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from samkv_integrations.bench.intervals import interval
from samkv_integrations.bench.variants import TRUTH
from samkv_integrations.figures import Row

ALL = "all"
"""The ``kind`` of the rows over every kind."""

_NOT_MEANS = ("documents", "rouge_l")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """A row for each (label, kind, documents), and for the totals over either and both.

    kind `ALL` and documents None stand for all. Scores, shares and bytes are means, times and
    ``ttft_ratio`` medians over questions. With `recompute` among the labels, also the share of
    questions whose answer is the same as its.
    """
    groups: dict[tuple[str, str, int | None], list[Row]] = {}
    truth: dict[str, Row] = {}
    for row in rows:
        label, kind, documents = row["label"], row["kind"], row["documents"]
        for place in dict.fromkeys(
            [(ALL, None), (kind, None), (ALL, documents), (kind, documents)]
        ):
            groups.setdefault((label, *place), []).append(row)
        if label == TRUTH:
            truth[row["id"]] = row
    kinds = list(dict.fromkeys([ALL, *(kind for _, kind, _ in groups)]))
    order = sorted(groups, key=lambda g: (kinds.index(g[1]), g[2] or 0))
    return [_summary(groups[name], name, truth) for name in order]


def _summary(
    group: Sequence[Row],
    name: tuple[str, str, int | None],
    truth: Mapping[str, Row],
) -> Row:
    label, kind, documents = name
    line: dict[str, Any] = {
        "label": label,
        "kind": kind,
        "documents": documents,
        "questions": len(group),
    }
    line["dataset"] = ", ".join(sorted({row["dataset"] for row in group}))
    for key in ("method", "eviction", "model"):
        line[key] = group[0][key]
    for score in ("f1", "exact_match"):
        values = [row[score] for row in group]
        line[score] = fmean(values)
        line[f"{score}_low"], line[f"{score}_high"] = interval(values)
    if all("rouge_l" in row for row in group):
        line["rouge_l"] = fmean(row["rouge_l"] for row in group)
    for key, value in group[0].items():
        if key not in line and key not in _NOT_MEANS and isinstance(value, int | float):
            middle = median if key.endswith("_s") else fmean
            line[key] = middle([row[key] for row in group])
    line["chunk_misses"] = sum(sum(row["chunk_misses"].values()) for row in group)
    if all(row["id"] in truth for row in group):
        pairs = [(row, truth[row["id"]]) for row in group]
        line["same_as_recompute"] = fmean(row["answer"] == full["answer"] for row, full in pairs)
        line["ttft_ratio"] = median(row["ttft_s"] / full["ttft_s"] for row, full in pairs)
    return line

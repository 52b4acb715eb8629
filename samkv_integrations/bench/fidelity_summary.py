"""The rows of a fidelity run, summarised by label and data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from samkv_integrations.bench.divergence import DIVERGENCES, MEASURES, OF_REFERENCE
from samkv_integrations.bench.intervals import interval, ratio_interval
from samkv_integrations.bench.quality_summary import ALL
from samkv_integrations.figures import Row

REUSE = "reuse"
"""The method of chunk caches as they are, which other labels' figures are divided by."""

_SHARED = (*DIVERGENCES, "first_top1", "top1")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """A row for each (label, kind), and for each label over all kinds, which is `ALL`.

    Figures are means over questions with 95 % bootstrap intervals, those of KL also medians. With
    `REUSE` without eviction among the labels, each figure but ``answer_llr`` also as a multiple of
    the first such label's (``kl_of_reuse``), those of KL with intervals; None where that is 0.
    ``answer_llr`` is left out unless all questions have it. All labels must have the same
    questions, in the same order.
    """
    rows = list(rows)
    base = next((r["label"] for r in rows if r["method"] == REUSE and not r["eviction"]), None)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for kind in (ALL, row["kind"]):
            groups.setdefault((kind, row["label"]), []).append(row)
    kinds = list(dict.fromkeys([ALL, *(kind for kind, _ in groups)]))
    order = sorted(groups, key=lambda name: kinds.index(name[0]))
    return [_summary(*name, groups[name], groups.get((name[0], base or ""))) for name in order]


def _summary(
    kind: str,
    label: str,
    group: Sequence[Row],
    reuse: Sequence[Row] | None,
) -> Row:
    line: dict[str, Any] = {"label": label, "kind": kind, "questions": len(group)}
    for key in ("method", "eviction", "store_bits"):
        line[key] = group[0][key]
    for name in ("tokens", "recompute_ratio"):
        line[name] = fmean(row[name] for row in group)
    for name in MEASURES:
        if name == OF_REFERENCE and any(row[name] is None for row in group):
            continue
        values = [row[name] for row in group]
        line[name] = fmean(values)
        line[f"{name}_low"], line[f"{name}_high"] = interval(values)
        if name in DIVERGENCES:
            line[f"{name}_median"] = median(values)
    for name in _SHARED if reuse else ():
        values, bases = ([row[name] for row in rows] for rows in (group, reuse or ()))
        base, ratio = fmean(bases), f"{name}_of_reuse"
        line[ratio] = line[name] / base if base else None
        if name in DIVERGENCES:
            low, high = ratio_interval(values, bases) or (None, None)
            line[f"{ratio}_low"], line[f"{ratio}_high"] = low, high
    return line

"""A picture of fidelity runs: distance from full prefill over the share that is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks import plot
from benchmarks.variants import ALL, TRUTH
from samkv_integrations.figures import Row


@dataclass(frozen=True, kw_only=True)
class Point:
    """A label of a model. share: recomputed, in percent. low, high: ends of the interval of kl."""

    label: str
    share: float
    kl: float
    low: float
    high: float


def points(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Model -> its labels over all questions, the floor left out.

    So are KLs of 0, as full prefill's, which have no place on a logarithmic axis.
    """
    found: dict[str, list[Point]] = {}
    for row in rows:
        line = found.setdefault(row["model"], [])
        if row["kind"] == ALL and row["kl"] > 0 and not _is_floor(row):
            line.append(
                Point(
                    label=row["label"], share=100 * row["recompute_ratio"], kl=row["kl"],
                    low=row["kl_low"], high=row["kl_high"],
                )
            )  # fmt: skip
    return found


def floors(rows: Sequence[Row]) -> dict[str, float]:
    """Model -> KL of its floor, where one above 0 was measured."""
    return {
        row["model"]: row["kl"]
        for row in rows
        if row["kind"] == ALL and _is_floor(row) and row["kl"] > 0
    }


def _is_floor(row: Row) -> bool:
    return str(row["label"]).startswith(f"{TRUTH}, ")


def draw(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Write the picture of summary rows, each with its ``model``: a colour for each of them.

    KL along the answer, with its interval, over the share of the context that is recomputed; a
    marker for each label, a dashed line for each floor.
    """
    plot.check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    found, dashed = points(rows), floors(rows)
    labels = list(dict.fromkeys(point.label for line in found.values() for point in line))
    markers = dict(zip(labels, cycle(plot.MARKERS), strict=False))
    for (model, line), colour in zip(found.items(), cycle(plot.COLOURS)):
        for point in line:
            axes.errorbar(
                point.share, point.kl, [[point.kl - point.low], [point.high - point.kl]],
                marker=markers[point.label], color=colour, linestyle="none", linewidth=0.8,
                markersize=6,
            )  # fmt: skip
        axes.plot([], [], color=colour, linewidth=4, label=model)
        if model in dashed:
            axes.axhline(dashed[model], color=colour, linestyle="--", linewidth=1)
            axes.plot([], [], color=colour, linestyle="--", label=f"{model}, floor")
    for label, marker in markers.items():
        axes.plot([], [], color="#555555", marker=marker, linestyle="none", label=label)
    axes.set_yscale("log")
    axes.set(xlabel="recomputed, % of the context", ylabel="KL along the answer, nats")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)

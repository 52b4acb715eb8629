"""A picture of a run: agreement over first token, a mark for each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path

from samkv_integrations.bench import plot
from samkv_integrations.tuning.standing import Standing


def draw(standings: Sequence[Standing], path: Path, *, target: float, chosen: str | None) -> None:
    """Write the picture, with 95 % intervals; the chosen candidate's mark is larger.

    Raises MissingExtra without matplotlib, InvalidOption for another ending than .png or .svg.
    """
    plot.check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = cycle(product(plot.MARKERS, plot.COLOURS))
    for each, (marker, colour) in zip(standings, styles, strict=False):
        low, high = each.agreement - each.low, each.high - each.agreement
        axes.errorbar(
            [each.ttft_ratio], [each.agreement], yerr=[[max(0.0, low)], [max(0.0, high)]],
            color=colour, marker=marker, markersize=11 if each.label == chosen else 6,
            elinewidth=0.8, capsize=2, linestyle="none",
            label=f"{each.label} ({each.n} questions)",
        )  # fmt: skip
    axes.axhline(target, color="#888888", linewidth=0.8, linestyle="--")
    axes.set(xlabel="first token, of full prefill", ylabel="agreement with full prefill")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    marks = axes.get_legend_handles_labels()
    figure.legend(*marks, loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)

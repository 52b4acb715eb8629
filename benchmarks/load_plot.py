"""A picture of a run of load: how soon answers begin, and how many are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import plot
from benchmarks.load import Block, Pace
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS_IN_A_ROW = 3


def check(path: Path) -> None:
    """Raise InvalidOption or MissingExtra if no picture can be written to ``path``."""
    plot.check(path)
    if not path.parent.is_dir():
        raise InvalidOption(f"the folder {path.parent} of {path} does not exist; make it first")


def distributions(blocks: Sequence[Block]) -> dict[Pace, dict[str, list[tuple[float, float]]]]:
    """Pace -> label -> (seconds to first token, share of the requests that had it by then).

    Requests that were not answered count, and never have it, so a line may end below 1.
    """
    firsts: dict[Pace, dict[str, list[float]]] = {}
    for block in blocks:
        times = firsts.setdefault(block.pace, {}).setdefault(block.label, [])
        times += [
            math.inf if record.error or record.ttft_s is None else record.ttft_s
            for record in block.records
        ]
    return {
        pace: {
            label: [
                (seconds, n / len(times))
                for n, seconds in enumerate(sorted(times), start=1)
                if seconds < math.inf
            ]
            for label, times in of_pace.items()
        }
        for pace, of_pace in firsts.items()
    }


def draw(blocks: Sequence[Block], rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Write the picture of a run and its `load_summary.rows_of`.

    A panel a pace with the cumulative distribution of the time to first token, and, of several
    paces, one with requests a second.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = distributions(blocks)
    n_panels = len(found) + (len(found) > 1)
    across = min(n_panels, _PANELS_IN_A_ROW)
    down = math.ceil(n_panels / across)
    figure = Figure(figsize=(5 * across, 4 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    labels = dict.fromkeys(row["label"] for row in rows)
    colours = {label: plot.COLOURS[n % len(plot.COLOURS)] for n, label in enumerate(labels)}
    for panel, (pace, lines) in zip(panels, found.items(), strict=False):
        _draw_distribution(panel, lines, colours, str(pace))
    if len(found) > 1:
        _draw_throughput(panels[len(found)], rows, colours)
    for panel in panels[:n_panels]:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8)
    for panel in panels[n_panels:]:
        panel.set_axis_off()
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _draw_distribution(
    panel: Axes,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    colours: Mapping[str, str],
    title: str,
) -> None:
    for label, line in lines.items():
        # from 0 up, also where nothing was answered
        xs, ys = zip(*((line[0][0], 0.0), *line), strict=True) if line else ((), ())
        panel.step(xs, ys, where="post", color=colours[label], label=label)
    panel.set(
        xlabel="time to first token, s", ylabel="share of requests", title=title, ylim=(0, 1.02)
    )
    panel.set_xlim(left=0)


def _draw_throughput(panel: Axes, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    axis = "concurrency" if rows[0]["rate"] is None else "rate"
    for label, colour in colours.items():
        points = sorted((row[axis], row["requests_per_s"]) for row in rows if row["label"] == label)
        xs, ys = zip(*points, strict=True)
        panel.plot(xs, ys, color=colour, marker="o", markersize=5, label=label)
    words = {"concurrency": "clients", "rate": "requests sent a second"}
    panel.set(xlabel=words[axis], ylabel="requests answered a second")
    panel.set_ylim(bottom=0)

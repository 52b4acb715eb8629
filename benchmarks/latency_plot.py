"""A picture of a latency run: first token over the length of chunks, a line for each method."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import cycle, product
from pathlib import Path
from textwrap import fill

from benchmarks import plot
from benchmarks.commands import TRUTH
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import Row

_PANELS_IN_A_ROW = 4
_WORDS = {
    "n_chunks": "{} chunks",
    "text_tokens": "{} uncached tokens",
    "cached_share": "{:g} of the chunks cached",
    "page_cache": "{} page cache",
    "question": "question {}",
}
"""Column of a cell -> how a panel's title says it; each combination is a panel."""


def check(path: Path, labels: Collection[str]) -> None:
    """Raise InvalidOption or MissingExtra if no picture of these methods can be written."""
    plot.check(path)
    if TRUTH not in labels:
        raise InvalidOption(f"--plot shows shares of {TRUTH!r}; add it to --methods")
    if not path.parent.is_dir():
        raise InvalidOption(f"the folder {path.parent} of {path} does not exist; make it first")


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Title -> label -> (chunk tokens, first token in percent of full prefill's), by length.

    A title says what differs between panels; it is empty if there is one.
    """
    varying = [name for name in _WORDS if len({row[name] for row in rows}) > 1]
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        title = ", ".join(_WORDS[name].format(row[name]) for name in varying)
        line = found.setdefault(title, {}).setdefault(row["label"], [])
        line.append((row["chunk_tokens"], 100 * row["ttft_ratio"]))
    return {
        title: {label: sorted(line) for label, line in lines.items()}
        for title, lines in found.items()
    }


def draw(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Write the picture of the rows of `latency.run`, which must have ``ttft_ratio``."""
    check(path, {row["label"] for row in rows})
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = panels(rows)
    across = min(len(found), _PANELS_IN_A_ROW)
    down = math.ceil(len(found) / across)
    figure = Figure(figsize=(5 * across + 2, 4 * down), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    labels = list(dict.fromkeys(row["label"] for row in rows))
    styles = dict(zip(labels, cycle(product(plot.MARKERS, plot.COLOURS)), strict=False))
    lengths = sorted({row["chunk_tokens"] for row in rows})
    for panel, (name, lines) in zip(axes, found.items(), strict=False):
        for label, line in lines.items():
            marker, colour = styles[label]
            xs, ys = zip(*line, strict=True)
            panel.plot(xs, ys, color=colour, marker=marker, markersize=5, label=label)
        panel.set_title(fill(name, 44), fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set(xlabel="tokens in a chunk", ylabel="first token, % of full prefill")
        panel.label_outer()
    axes[0].set_ylim(bottom=0)  # all share it, so it waits for what the last one draws
    for empty in axes[len(found) :]:
        empty.set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)

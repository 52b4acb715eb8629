"""A picture of a quality run: answers against time and against what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.variants import AT
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

SUFFIXES = (".png", ".svg")
FULL_AREA = 900
"""Area of a circle that holds as much as full prefill, in square points."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart by colour-blind readers; yellow is left out, too faint on white."""

MARKERS = "os^Dvp*X"


def check(path: Path) -> None:
    """Raise InvalidOption or MissingExtra if no picture can be written to ``path``."""
    if path.suffix not in SUFFIXES:
        raise InvalidOption(f"--plot {path}: it must end in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra.of("matplotlib", "bench") from error


def draw(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Write the picture of the rows of `summarise` over all questions, with ``ttft_ratio``.

    Left, as the paper's Figure 1: F1 over time to first token; a circle's area is the cache in
    memory; time and memory are shares of full prefill's. Right: F1 over kept ratio, a line a
    method.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(_series(row), []).append(row)
    styles = dict(zip(series, cycle(product(MARKERS, COLOURS)), strict=False))
    circles = _draw_times(left, series, styles)
    lines = _draw_kept_ratios(right, series, styles)
    for axes in (left, right):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12, y=0.12)
    if title:
        figure.suptitle(title, fontsize=10)
    _place(left, *circles)
    _place(right, *lines)
    figure.savefig(path, dpi=150)


@dataclass(frozen=True, kw_only=True)
class _Label:
    """A text beside a point, whose mark has a radius in points."""

    x: float
    y: float
    text: str
    colour: str
    radius: float


_Mark = tuple[float, float, float]
"""x, y and radius in points of something drawn."""

_Styles = Mapping[str, tuple[str, str]]
"""Series -> marker and colour."""


def _draw_times(
    axes: Axes, series: Mapping[str, Sequence[Row]], styles: _Styles
) -> tuple[list[_Label], list[_Mark]]:
    """F1 over time to first token, a circle a row; returns its labels, and what they must avoid."""
    labels, circles = [], []
    for name, group in series.items():
        _, colour = styles[name]
        for row in group:
            x, y = 100 * row["ttft_ratio"], row["f1"]
            area = FULL_AREA * row["kv_bytes"] / row["full_kv_bytes"]
            axes.scatter(x, y, area, color=colour, alpha=0.35, linewidths=0)
            axes.scatter(x, y, 9, color=colour)
            radius = math.sqrt(area / math.pi)
            text = row["label"] if row is group[0] else _budget(row)
            labels.append(_Label(x=x, y=y, text=text, colour=colour, radius=radius))
            circles.append((x, y, radius))
    axes.set(
        xlabel="time to first token, % of full prefill\n(area: cache in memory, share of full)",
        ylabel="F1",
    )
    return labels, circles


def _draw_kept_ratios(
    axes: Axes, series: Mapping[str, Sequence[Row]], styles: _Styles
) -> tuple[list[_Label], list[_Mark]]:
    """F1 over kept ratio, a line a method; returns its labels, and what they must avoid."""
    labels, marks = [], []
    for name, group in series.items():
        marker, colour = styles[name]
        ordered = sorted(group, key=lambda row: float(row["kept_ratio"]))
        xs, ys = [row["kept_ratio"] for row in ordered], [row["f1"] for row in ordered]
        axes.plot(xs, ys, color=colour, marker=marker, markersize=6, linewidth=1.5)
        labels.append(_Label(x=xs[0], y=ys[0], text=name, colour=colour, radius=4))
        marks += [(x, y, 4.0) for x, y in _along(xs, ys)]
    axes.set(xlabel="kept ratio", xlim=(-0.03, 1.08))
    axes.tick_params(labelleft=True)
    return labels, marks


def _along(xs: Sequence[float], ys: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The points of a line and some between them."""
    yield xs[0], ys[0]
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        yield from ((x0 + (x1 - x0) * i / 8, y0 + (y1 - y0) * i / 8) for i in range(1, 9))


def _series(row: Row) -> str:
    name, at, _ = str(row["label"]).rpartition(AT)
    return name if at else str(row["label"])


def _budget(row: Row) -> str:
    return str(row["label"]).rpartition(AT)[2]


def _place(axes: Axes, labels: Sequence[_Label], marks: Sequence[_Mark]) -> None:
    """Write each text where it covers no other text and no mark, nearest place first."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    frame = axes.get_window_extent(renderer)
    drawn = []
    for x, y, radius in marks:
        (px, py), half = axes.transData.transform((x, y)), 0.8 * radius * figure.dpi / 72
        drawn.append(Bbox.from_extents(px - half, py - half, px + half, py + half))
    taken: list[Bbox] = []
    for label in labels:
        note = axes.annotate(
            label.text, (label.x, label.y), (9, 0), textcoords="offset points", fontsize=8,
            color="#222222", va="center", arrowprops={"arrowstyle": "-", "color": label.colour,
                                                      "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip

        def put(way: tuple[float, float], note: Any = note) -> Bbox:  # noqa: ANN401
            note.set_position(way)
            note.set_horizontalalignment("left" if way[0] > 0 else "right")
            return _text_box(note, renderer)

        def cost(way: tuple[float, float]) -> float:
            box = put(way)
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1
                           and frame.y0 <= box.y0 and box.y1 <= frame.y1)  # fmt: skip
            texts = sum(box.overlaps(other) for other in taken)
            return 100 * outside + 3 * texts + sum(box.overlaps(other) for other in drawn)

        # min takes the first of equals, which is the nearest
        taken.append(put(min(_ways(label.radius), key=cost)))


def _ways(radius: float) -> Iterator[tuple[float, float]]:
    """Where a text may stand beside a point, nearest first, in points."""
    for step in (5, 12, 22, 34, 48, 64, 82, 102, 124, 148):
        far = radius + step
        yield from ((far, 0), (-far, 0))
        yield from ((9, -far), (-9, -far), (9, far), (-9, far))
        yield from ((far, -far), (-far, -far), (far, far), (-far, far))


def _text_box(note: Any, renderer: Any) -> Bbox:  # noqa: ANN401
    """Where the text stands, its arrow left out."""
    from matplotlib.text import Text

    note.update_positions(renderer)
    box: Bbox = Text.get_window_extent(note, renderer)
    return box.padded(1.5)

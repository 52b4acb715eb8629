"""Tables and the picture of runs of `right_answers`, those of several models pooled.

python -m benchmarks right_table RUN RUN --half report --by-kind --plot right_answers.svg
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer

from benchmarks import plot as picture
from benchmarks.commands import TRUTH, command_line, markdown_table
from benchmarks.journal import ROWS
from samkv_integrations.cli.formatting import Row
from samkv_integrations.errors import InvalidOption
from samkv_integrations.ingest.documents import read_text
from samkv_integrations.lab.evaluation import Paired

COLUMNS = (
    "method", "right", "lost, won", "difference, points (95 %)", "p", "recomputed",
    "first token", "its mean", "first token, wall", "whole answer", "KL first, along",
)  # fmt: skip


def rows_of(run: Path) -> list[Row]:
    """The rows of a run, whose ids are told from those of other runs by ``run``.

    Raises InvalidOption if the folder holds none.
    """
    file = run / ROWS
    if not file.is_file():
        raise InvalidOption(
            f"{run} holds no {ROWS}; give the folder of a run of 'python -m benchmarks "
            "right_answers'"
        )
    lines = [line for line in read_text(file).split("\n") if line.strip()]
    return [{**json.loads(line), "run": run.name} for line in lines]


def summarise(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """A row for each label, over the questions that all labels have answered.

    first, whole: medians of the ratios of CPU seconds to full prefill's; whole answers and
    kl_along of the questions whose answers were decoded alone. first_mean: the mean of those of
    ``first``. wall: as ``first``, of wall seconds; None for rows of earlier commits, which lack
    them.
    """
    by_question: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_question.setdefault((row.get("run", ""), row["id"]), {})[row["label"]] = row
    whole = [found for found in by_question.values() if all(label in found for label in labels)]
    lines: list[Row] = []
    for label in labels if whole else ():
        mine, full = [each[label] for each in whole], [each[TRUTH] for each in whole]
        paired = Paired.of([row["right"] for row in mine], [row["right"] for row in full])
        pairs = list(zip(mine, full, strict=True))
        timed = [
            (own["first_s"] + own["decode_s"]) / (theirs["first_s"] + theirs["decode_s"])
            for own, theirs in pairs
            if own["decode_s"] is not None and theirs["decode_s"] is not None
        ]
        waited = [
            own["first_wall_s"] / theirs["first_wall_s"]
            for own, theirs in pairs
            if "first_wall_s" in own and "first_wall_s" in theirs
        ]
        along = [row["kl_along"] for row in mine if "kl_along" in row]
        lines.append({
            "label": label, **asdict(paired), "points": paired.points,
            "recomputed": fmean(row["recomputed"] for row in mine),
            "first": median(own["first_s"] / theirs["first_s"] for own, theirs in pairs),
            "first_mean": fmean(own["first_s"] / theirs["first_s"] for own, theirs in pairs),
            "wall": median(waited) if waited else None,
            "whole": median(timed) if timed else None,
            "kl_first": fmean(row["kl_first"] for row in mine),
            "kl_along": fmean(along) if along else None,
        })  # fmt: skip
    return lines


def table(lines: Sequence[Row]) -> str:
    """The table of `summarise`."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [
        [
            line["label"], f"{line['right']} of {line['questions']}",
            f"{line['lost']}, {line['won']}", line["points"], f"{line['p']:.2f}",
            number(line["recomputed"], ".3f"), number(line["first"], ".3f"),
            number(line["first_mean"], ".3f"), number(line["wall"], ".3f"),
            number(line["whole"], ".2f"),
            f"{number(line['kl_first'], '.3f')}, {number(line['kl_along'], '.3f')}",
        ]
        for line in lines
    ]  # fmt: skip
    return markdown_table(COLUMNS, cells, left=1)


def short_table(rows: Sequence[Row], labels: Sequence[str], groups: Mapping[str, str]) -> str:
    """Difference in points and first token of each label, a pair of columns a group of rows.

    groups: title of the columns -> value of the field ``run`` or ``kind``.
    """
    columns, cells = ["method"], [[label] for label in labels]
    for title, value in groups.items():
        lines = summarise([row for row in rows if value in (row["run"], row["kind"])], labels)
        if not lines:
            continue
        columns.append(f"{title} ({lines[0]['full']} of {lines[0]['questions']} right)")
        for cell, line in zip(cells, lines, strict=True):
            cell.append(f"{line['points']}; {line['first']:.3f}")
    return markdown_table(columns, cells, left=1)


def draw(groups: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Right answers against first token: a panel a group, a point with its interval a method.

    groups: title -> rows of `summarise`.
    """
    picture.check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(groups), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(panels, groups.items(), strict=True):
        axes.axhline(0, color="0.6", linewidth=1)
        for number, line in enumerate(lines):
            colour = picture.COLOURS[number % len(picture.COLOURS)]
            marker = picture.MARKERS[number % len(picture.MARKERS)]
            y, low, high = (100 * line[name] for name in ("difference", "low", "high"))
            errors = [[y - low], [high - y]]
            axes.errorbar(
                line["first"], y, yerr=errors, fmt=marker, color=colour, capsize=3,
                label=line["label"],
            )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("CPU seconds of the first token, of full prefill's")
        axes.set_xlim(0, 1.05)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("right answers, points above full prefill's")
    panels[-1].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=150)


def renamed(rows: Sequence[Row], call: str) -> list[Row]:
    """The rows, those of one run and label under another label. call: ``RUN:LABEL=NEW``.

    Raises InvalidOption if the run has no such label.
    """
    run, _, labels = call.partition(":")
    label, _, new = labels.rpartition("=")
    if not any(row["run"] == run and row["label"] == label for row in rows):
        raise InvalidOption(f"--call {call!r}: give RUN:LABEL=NEW, of a run that has the label")
    kept = [row for row in rows if (row["run"], row["label"]) != (run, new)]
    return [
        {**row, "label": new} if (row["run"], row["label"]) == (run, label) else row for row in kept
    ]


def right_table(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, a model each.")],
    methods: Annotated[
        str, typer.Option(help="Labels, with commas between; else those of the first run.")
    ] = "",
    half: Annotated[str, typer.Option(help="choose, report or all.")] = "all",
    by_kind: Annotated[
        bool, typer.Option(help="A table by kind of use and by model, too.")
    ] = False,
    call: Annotated[
        list[str] | None,
        typer.Option(
            help="RUN:LABEL=NEW: a label of one run under another name, instead of its own."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture, .png or .svg.")] = None,
) -> None:
    """Right answers of runs of `right_answers`, pooled, by model and by kind of use."""
    if half not in ("choose", "report", "all"):
        raise InvalidOption(f"half={half!r}; allowed: choose, report, all")
    rows = [row for run in runs for row in rows_of(run) if half in (row["half"], "all")]
    for each in call or ():
        rows = renamed(rows, each)
    labels = [TRUTH, *(each.strip() for each in methods.split(",") if each.strip())]
    if not methods:
        labels += [row["label"] for row in rows]
    labels = list(dict.fromkeys(labels))
    lines = summarise(rows, labels)
    if not lines:
        raise InvalidOption(f"no question was answered by all of {', '.join(labels)}; name fewer")
    parts = [table(lines)]
    models, kinds = ({row[name]: row[name] for row in rows} for name in ("run", "kind"))
    if by_kind:
        parts += [short_table(rows, labels, models), short_table(rows, labels, kinds)]
    typer.echo("\n\n".join(parts))
    if plot:
        of_models = {
            name: summarise([row for row in rows if row["run"] == name], labels) for name in models
        }
        draw({"both models" if len(models) > 1 else "all": lines, **of_models}, plot)


app = command_line(right_table)
main = app

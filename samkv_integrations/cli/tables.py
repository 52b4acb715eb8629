"""Output of the commands: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samkv_integrations.cli.formatting import (
    Row,
    in_one_line,
    percent,
    ratio,
    seconds,
    size,
    to_json,
    visible,
)

PIPE_WIDTH = 100
"""Width of tables in files and pipes, in columns."""


class _Console(Console):
    """A console that replaces control characters, which rich would pass to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False) -> Console:
    """A console on the current standard output or standard error."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    # texts of users must stay as they are: "[Title]" is text, and so is ":smile:"
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def report(
    command: str, model: str | None, rows: Sequence[Row], *shown: Table | str, as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the result of a command: the object of ``--json``, see `to_json`, or ``shown``.

    Without ``shown`` people see the rows as a table.
    """
    if as_json:
        typer.echo(to_json(command, model, rows, more))
        return
    for each in shown or [rows_table(rows)]:
        console().print(each, soft_wrap=isinstance(each, str))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, gap: int = 2
) -> Table:
    """A plain table. The first ``left`` columns are left-aligned words, the others figures.

    gap: spaces between columns.
    """
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if index < left else "right",
            overflow="fold",
            no_wrap=index == 0 or index >= left,
        )
    for row in rows:
        made.add_row(*row)
    return made


def rows_table(rows: Sequence[Row], names: Sequence[str] | None = None) -> Table:
    """Rows of ``--json`` as a table. names: its columns; None for all."""
    if names is None:
        names = [*rows[0]] if rows else []
    cells = [[_cell(name, row[name]) for name in names] for row in rows]
    words = takewhile(lambda name: rows and isinstance(rows[0][name], str | None), names)
    titles = [name.removeprefix("n_").replace("_", "\n") for name in names]
    return table(titles, cells, left=len([*words]), gap=1)


def _cell(name: str, value: object) -> str:
    """A value as its column shows it: a size where the name has "bytes", a share for a rate."""
    if isinstance(value, int | float) and "bytes" in name:
        return size(value)
    if isinstance(value, float):
        return percent(value) if name.endswith("rate") else f"{value:.1f}"
    return "-" if value is None else str(value) or "''"


def comparison_table(rows: Sequence[Row]) -> Table:
    """The answers to one question, with a row for each method."""
    columns = (
        "method", "answer", "attended\nto", "recom-\nputed", "bytes\nread", "first\ntoken", "ratio",
    )  # fmt: skip
    cells = [
        (
            row["method"], " ".join(row["answer"].split()), percent(row["kept_ratio"]),
            percent(row["recompute_ratio"]), size(row["bytes_read"]), seconds(row["ttft_s"]),
            ratio(row.get("ttft_ratio")),
        )
        for row in rows
    ]  # fmt: skip
    return table(columns, cells, left=2)


def sources_table(sources: Sequence[str], texts: Sequence[str]) -> Table:
    """The sources of an answer: file name and text of each chunk, nearest first."""
    flat = [" ".join(text.split()) for text in texts]
    short = [text if len(text) <= 60 else text[:59] + "…" for text in flat]
    named = [in_one_line(Path(source).name) for source in sources]
    return table(("source", "text"), zip(named, short, strict=True), left=2)

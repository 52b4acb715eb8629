"""Output of the commands: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samkv_integrations.formatting import (
    Row,
    count,
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
    """Shows texts without their escape sequences, which rich lets through."""

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False) -> Console:
    """A console on the current standard output or standard error."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    # texts of users are no markup: "[Title]" is no style, ":smile:" no emoji
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def write_json(command: str, model: str | None, rows: Iterable[Row]) -> None:
    """Write the output of ``--json``. model: its name, if the command has one."""
    write_text(to_json(command, model, rows))


def write_text(text: str) -> None:
    """Write text for another program to standard output."""
    typer.echo(text)


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


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A markdown table. The first ``left`` columns are left-aligned words, the others figures."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


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
    named = [Path(source).name for source in sources]
    return table(("source", "text"), zip(named, short, strict=True), left=2)


def report_lines(row: Row) -> list[str]:
    """The report of one answer, in words."""
    with_prompt = row["found"] - row["reused"] - row["computed_now"]
    parts = [f"{count(row['found'], 'chunk')} found", f"{row['reused']} reused"]
    parts += [f"{row['computed_now']} computed now"] if row["computed_now"] else []
    parts += [f"{with_prompt} computed with the prompt"] if with_prompt else []
    chunks = ", ".join(parts)
    if misses := row["chunk_misses"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in misses.items())
        chunks += f" ({sum(misses.values())} without a cache: {reasons})"
    came_to = f" (which did {row['ran']})" if row["ran"] != row["method"] else ""
    attended = "went on with" if row["eviction"] else "attended to"
    cost = "" if row["kept_ratio"] == 1 else f"{attended} {percent(row['kept_ratio'])}, "
    cost += (
        f"recomputed {percent(row['recompute_ratio'])} of the chunks' tokens, "
        f"read {size(row['bytes_read'])}, "
        f"first token after {seconds(row['ttft_s'])}"
    )
    if row["eviction"]:
        cost += (
            f"; {size(row['kv_bytes'])} of working cache, {size(row['decode_kv_bytes'])} at the "
            f"end with {row['eviction']}"
        )
    asked = f"{row['method']}{came_to} on {row['model']}: {row['prompt_tokens']} prompt tokens"
    return [f"{asked}, {chunks}", cost]

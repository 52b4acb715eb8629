"""What the benchmarks with options share: errors, lists, models, files and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import typer
import typer.core

from benchmarks.models import use_threads_for
from benchmarks.pairs import Spread
from benchmarks.run_settings import run_of
from samkv_integrations.cli import formatting
from samkv_integrations.cli.app import USER_ERROR
from samkv_integrations.cli.formatting import Row
from samkv_integrations.cli.loading import words
from samkv_integrations.errors import InvalidOption, SamkvError
from samkv_integrations.methods import METHODS
from samkv_integrations.runtimes import get_runtime
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.transformers.loading import load_model

TRUTH = "recompute"
"""Label of full prefill, which everything else is measured against."""


class _Command(typer.core.TyperCommand):
    """Shows an error of ours as one line instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SamkvError as error:
            typer.echo(f"benchmarks: {formatting.visible(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(USER_ERROR) from error


def command_line(*functions: Callable[..., None]) -> typer.Typer:
    """The command line of one benchmark; several functions are subcommands."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    for function in functions:
        app.command(cls=_Command)(function)
    return app


def method_names(text: str) -> list[str]:
    """Names of methods; ``all`` for every one."""
    return list(METHODS) if text == "all" else words(text)


def shares(option: str, text: str) -> list[float]:
    """The numbers between commas. Raises InvalidOption, which names ``option``, for other text."""
    try:
        return [float(part) for part in words(text)]
    except ValueError as error:
        raise InvalidOption(f"{option} {text!r}; give numbers, as in 0.1,0.2") from error


def counts(option: str, text: str) -> list[int]:
    """As `shares`, for whole numbers."""
    try:
        return [int(part) for part in words(text)]
    except ValueError as error:
        raise InvalidOption(f"{option} {text!r}; give whole numbers, as in 4,8") from error


def loaded_model(model: str, device: str, dtype: str, runtime: str = "transformers") -> Any:  # noqa: ANN401
    """The model that the options name; device and dtype are for transformers.

    Other runtimes use as many threads as torch would, so that OMP_NUM_THREADS counts for all.
    """
    if runtime == "transformers":
        use_threads_for(model)
        return load_model(model, device=device, dtype=dtype)
    return get_runtime(runtime).load(model, n_threads=torch.get_num_threads(), n_ctx=2**15)


def show_run(model: Runtime, columns: Sequence[str], rows: Sequence[Row], *, as_json: bool) -> None:
    """Show the rows of a run, as a table or as JSON, with its command, commit and hardware."""
    if as_json:
        plain = [
            {name: asdict(each) if isinstance(each, Spread) else each for name, each in row.items()}
            for row in rows
        ]
        typer.echo(formatting.to_json("benchmarks", model.name, plain, run_of(model)))
        return
    typer.echo(f"{run_of(model)}", err=True)
    typer.echo(time_table(columns, rows))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A markdown table. The first ``left`` columns are left-aligned words, the others figures."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def time_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """The ``columns`` of ``rows``; their names are written with spaces."""
    cells = [[_cell(name, row[name]) for name in columns] for row in rows]
    return markdown_table([column.replace("_", " ") for column in columns], cells)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") or name == "bytes_read":
        assert isinstance(value, int | float)
        return formatting.size(value)
    if name.endswith("tokens_per_s"):
        return f"{value:.1f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

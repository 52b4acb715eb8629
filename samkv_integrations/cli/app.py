"""The command line, ``samkv``: its commands and its errors.

With ``--json`` a command writes one object to standard output, and everything else to standard
error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
import typer.core

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import formatting, store
from samkv_integrations.cli.ask import ask, inspect, methods
from samkv_integrations.cli.doctor import doctor
from samkv_integrations.cli.ingest import ingest, remove
from samkv_integrations.cli.quickstart import quickstart
from samkv_integrations.cli.serve import serve
from samkv_integrations.cli.tune import tune
from samkv_integrations.errors import MissingExtra, SamkvError
from samkv_integrations.release import version

USER_ERROR = 2
"""Exit code of an error of the user."""


UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's copy of it


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Inside this block, a user's error is one line, in place of a traceback or the usage."""
    try:
        yield
    except SamkvError as error:
        said = " ".join(str(error).split())
    except ModuleNotFoundError as error:  # the runtime that a module needs is not installed
        if error.name not in ("torch", "transformers"):
            raise
        said = str(MissingExtra.of(error.name, "transformers"))
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # this only shows the help
            raise
        command = error.ctx.command_path.split()[1:] if error.ctx else ()
        shown = " ".join(["samkv", *command, "--help"])
        said = f"{error.format_message().rstrip('.')}; next step: {shown}"
    else:
        return
    typer.echo(f"samkv: {formatting.visible(said)}", err=True)
    raise typer.Exit(USER_ERROR)


class _Commands(typer.core.TyperGroup):
    """Commands whose errors are one line each."""

    def make_context(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401
        with _in_one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        with _in_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Answer from documents whose KV entries are cached, with a local model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # panels for groups would exceed a screen
    pretty_exceptions_enable=False,
)
for command in (methods, doctor, ingest, remove, ask, inspect, serve, quickstart, tune):
    app.command(cls=args.Command)(args.with_flags(command))
app.add_typer(store.app, name="store")


# constants of malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Let the tensors of a pass reuse the memory of the last pass; no effect without glibc.

    All threads allocate like the main thread, and up to 128 MiB of freed memory stay. Memory that
    is returned to the system comes back as pages of zeros, which takes time (docs/decisions.md).
    """
    with suppress(AttributeError, OSError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_MMAP_THRESHOLD, 2**25)  # glibc allows no more
        set_option(_M_TRIM_THRESHOLD, 2**27)


def main() -> None:
    """Entry point of the console script."""
    keep_freed_memory()
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samkv {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the release.")
    ] = False,
) -> None: ...

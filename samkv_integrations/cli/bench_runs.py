"""What ``samkv bench quality`` and ``samkv bench fidelity`` share: models, folders and files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from samkv_integrations.bench.journal import Journal, digest
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model

RUNS = Path(".samkv/bench")
"""Where runs are kept that are given no folder."""

STDOUT = Path("-")
"""Names standard output where a file may be named."""


def loaded_model(model: str, device: str, dtype: str) -> Model:
    """The model that the options name."""
    use_threads_for(model)
    return load_model(model, device=device, dtype=dtype)


def journal_of(
    output: Path | None, settings: Mapping[str, Any], *, fresh: bool, beside: str | None = None
) -> Journal:
    """The journal in ``output``, or in a folder of `RUNS` that is named after the settings."""
    return Journal(output or RUNS / digest(settings), settings, fresh=fresh, beside=beside)


def require_folder(file: Path | None) -> None:
    """Raise InvalidOption if ``file`` is to be written into a folder that does not exist."""
    if file and not file.parent.is_dir():
        raise InvalidOption(f"the folder {file.parent} of {file} does not exist; make it first")


def write(text: str, file: Path) -> None:
    """Write to ``file``, or to standard output if it is `STDOUT`."""
    typer.echo(text) if file == STDOUT else file.write_text(text + "\n", "utf-8")

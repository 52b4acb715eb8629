"""Calls of ``python -m benchmarks NAME`` that must succeed, or must fail."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from typer.testing import CliRunner, Result


def run(name: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(import_module(f"benchmarks.{name}").app, [*map(str, arguments)])


def ran(name: str, *arguments: str | Path) -> str:
    result = run(name, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout

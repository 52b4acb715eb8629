"""Calls of the command line that must succeed, or must fail."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from samkv_integrations.cli.app import app
from samkv_integrations.report import Report

REPORT_FIELDS = set(Report.__dataclass_fields__)


COMMANDS = {
    "methods", "doctor", "ingest", "remove", "ask", "quickstart", "store", "stats", "sync",
    "forget", "gc", "verify", "budget", "inspect", "push", "pull",
}  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def ran(*arguments: str) -> str:
    """Standard output of a command that must succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The rows of a command with --json, whose standard output must be one object."""
    found = json.loads(ran(*arguments, "--json"))
    assert list(found) == ["command", "version", "commit", "model", "rows"]
    assert found["command"] == " ".join(a for a in arguments[:2] if a in COMMANDS)
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def error_of(*arguments: str) -> str:
    """The one line that a wrong call prints."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    # a progress bar may stand before it, and ends with a line break or a carriage return
    *before, line = result.stderr.strip().replace("\r", "\n").split("\n")
    assert line.startswith("samkv: "), result.stderr
    assert not any("Traceback" in other or "samkv: " in other for other in before)
    return line

"""docs/scale.md: its tables are what its commands print, and so are the figures it compares."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samkv_integrations.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^samkv (plan .*--markdown)$", PAGE, re.MULTILINE)
TABLES = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_table_but_the_last_has_its_command() -> None:
    assert len(COMMANDS) == len(TABLES) - 1 >= 7
    assert "measured" in TABLES[-1].splitlines()[0]


@pytest.mark.parametrize(("command", "table"), list(zip(COMMANDS, TABLES[:-1], strict=True)))
def test_a_table_is_what_its_command_prints(command: str, table: str) -> None:
    """If this fails, put what the command prints into the page."""
    assert table == printed(*shlex.split(command))


ON_BENCH = ("--chunks", "8", "--question-tokens")


@pytest.mark.parametrize(
    ("row", "options", "name", "scale", "digits"),
    [
        ("file over bfloat16, 512", "34 --dtype float32 --layers 8", "chunk_ratio", 1, 3),
        ("the same with 4 layers", "36 --dtype float32 --layers 4", "chunk_ratio", 1, 4),
        ("bytes of 8 chunks read", "36 --dtype float32 --layers 4", "read_bytes", 8, 0),
        ("full prefill, 8 layers", "34 --dtype float32 --layers 8 --prefill-tokens-s 588",
         "full_prefill_s", 1, 1),
        ("full prefill, 4 layers", "36 --dtype float32 --layers 4 --prefill-tokens-s 581",
         "full_prefill_s", 1, 1),
        ("8 chunks read from memory and checked, 4", "36 --dtype float32 --layers 4",
         "check_s", 1000, 0),
        ("8 chunks read from memory and checked, 24", "36 --dtype float32", "check_s", 1000, 0),
    ],
)  # fmt: skip
def test_a_figure_that_is_compared_is_what_the_command_says(
    row: str, options: str, name: str, scale: int, digits: int
) -> None:
    """The third column of the last table."""
    (line,) = [line for line in TABLES[-1].splitlines() if line.startswith(f"| {row}")]
    model = ("plan", "--model", "qwen2.5-0.5b", *ON_BENCH)
    (found,) = json.loads(printed(*model, *options.split(), "--json"))["rows"]
    shown = line.split("|")[3].replace(",", "").split()[0]
    assert float(shown) == round(scale * found[name], digits)

"""The harnesses of stores.

As commands: they fork, which a process of pytest with its threads must not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def rows_of(folder: Path, module: str, *arguments: object) -> list[dict[str, Any]]:
    """The rows that a harness writes, which ends well if it found nothing wrong."""
    file = folder / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", file, "--dir", folder]
    found = subprocess.run(
        [*map(str, command), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["rows"]
    return rows


@pytest.mark.slow
def test_a_store_survives_many_kills_and_sync_too(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "store_kills", "--kills", 300, "--sync-kills", 60, "--seed", 1)
    assert [row["violations"] for row in rows] == [0, 0]
    assert sum(row["kills"] for row in rows) >= 360


@pytest.mark.slow
def test_all_that_is_done_to_a_store_survives_a_kill_at_every_point(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "store_crash_points")
    assert [row["work"] for row in rows if row["violations"]] == []


@pytest.mark.slow
def test_a_soak_ends_with_right_answers_within_the_budget(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "store_soak", "--minutes", 0.5, "--questions", 24)
    row = {row["figure"]: row["value"] for row in rows}
    assert int(row["questions"]) > 20 and int(row["kills"]) > 4
    assert row["wrong_answers"] == row["uncaught_errors"] == row["left_over"] == "0"
    assert int(row["over_budget"]) <= int(row["largest_chunk"])


@pytest.mark.slow
def test_many_questions_leave_nothing_open(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "store_drift", "--questions", 400)
    assert len({row["descriptors"] for row in rows[1:]}) == 1
    assert len({row["store_files"] for row in rows[1:]}) == 1
    assert rows[-1]["memory_mb"] < 1.05 * rows[1]["memory_mb"]
    assert {row["found"] for row in rows} == {1.0}

"""The folder of a run, killed and gone on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.journal import ROWS, Journal
from samkv_integrations.errors import InvalidOption

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks.journal import ROWS, Journal

folder, rows, half = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with Journal(folder, {"model": "a"}) as journal:
    for n in range(len(journal.rows), len(journal.rows) + rows):
        journal.add({"id": f"q{n}", "label": "reuse"})
    if half:
        with (folder / ROWS).open("a") as out:
            out.write('{"label": "reuse", "id": "q')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_goes_on_with_its_whole_rows(tmp_path: Path) -> None:
    """Killed before its first row, between rows, and in the middle of a line."""
    for rows, half, held in ((0, 0, 0), (3, 0, 3), (2, 1, 5)):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, tmp_path, str(rows), str(half)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        with Journal(tmp_path, {"model": "a"}) as journal:
            assert list(journal.rows) == [(f"q{n}", "reuse") for n in range(held)]
    with Journal(tmp_path, {"model": "a"}) as journal:
        journal.add({"id": "q5", "label": "reuse"})
    lines = (tmp_path / ROWS).read_text("utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"q{n}" for n in range(6)]


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each would measure what the other one measures, and write its rows again."""
    with Journal(tmp_path, {"model": "a"}) as journal:
        with pytest.raises(InvalidOption, match="another process measures into .*--output"):
            Journal(tmp_path, {"model": "a"})
        journal.add({"id": "q", "label": "reuse"})
    with Journal(tmp_path, {"model": "a"}) as journal:
        assert list(journal.rows) == [("q", "reuse")]

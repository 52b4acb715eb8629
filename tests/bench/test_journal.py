"""The folder of a run, killed and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.journal import ROWS, RUN, Journal
from samkv_integrations.errors import InvalidOption
from tests.bench.asking import lasting
from tests.bench.asking import quality_command as command

ROOT = Path(__file__).parents[2]


NAMES = "recompute,reuse,samkv-fusion,samkv-guided"


KILLED = """
import os, signal, sys
from benchmarks.journal import ROWS, Journal
from benchmarks.quality import app

rows, half = int(sys.argv[1]), int(sys.argv[2])
add = Journal.add
written = 0

def add_or_die(self, row):
    global written
    if written == rows:
        if half:
            with (self.folder / ROWS).open("a") as out:
                out.write('{"label": "reuse", "id": "q')
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, row)
    written += 1

Journal.add = add_or_die
app(sys.argv[3:])
"""


@pytest.mark.slow  # three processes, 45 s; the fidelity bench stops and goes on in every run
def test_a_killed_run_goes_on_to_the_same_table(file: Path, tmp_path: Path) -> None:
    """Killed before its first answer, between answers, and in the middle of a line."""
    folder, out = tmp_path / "run", tmp_path / "out.json"
    arguments = ["--data", str(file), "--methods", NAMES, "--device", "cpu"]
    undisturbed = command(*arguments, "--output", tmp_path / "undisturbed", "--json", "-")
    assert undisturbed.exit_code == 0, undisturbed.stderr
    expected = json.loads(undisturbed.stdout)
    held = []
    for rows, half in ((0, 0), (3, 0), (2, 1)):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(rows), str(half), *arguments, "--output", folder],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        path = folder / ROWS
        held.append(path.read_text("utf-8").count("\n") if path.exists() else 0)
    assert held == [0, 3, 5]
    resumed = command(*arguments, "--output", folder, "--json", out)
    assert resumed.exit_code == 0, resumed.stderr
    found = json.loads(out.read_text("utf-8"))
    assert lasting(found.pop("rows")) == lasting(expected.pop("rows"))
    assert found == expected
    lines = (folder / ROWS).read_text("utf-8").splitlines()
    assert len({(r["id"], r["label"]) for r in map(json.loads, lines)}) == len(lines) == 12
    before = (folder / ROWS).read_bytes()
    assert command(*arguments, "--output", folder).exit_code == 0  # nothing is left to do
    assert (folder / ROWS).read_bytes() == before


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each would measure what the other one measures, and write its rows again."""
    with Journal(tmp_path, {"model": "a"}) as journal:
        for fresh in (False, True):
            with pytest.raises(InvalidOption, match="another process measures into .*--output"):
                Journal(tmp_path, {"model": "a"}, fresh=fresh)
        journal.add({"id": "q", "label": "reuse"})
    with Journal(tmp_path, {"model": "a"}) as journal:
        assert list(journal.rows) == [("q", "reuse")]


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    row = {"id": "q", "label": "reuse"}
    with Journal(folder, {"model": "a", "chat": False}) as journal:
        journal.add(row)
    with Journal(folder, {"model": "a", "chat": False}) as journal:
        assert journal.rows == {("q", "reuse"): row}
    with pytest.raises(InvalidOption, match="another chat, model; .*--output.*--fresh"):
        Journal(folder, {"model": "b", "chat": True})
    with Journal(folder, {"model": "b", "chat": True}, fresh=True) as journal:
        assert not journal.rows
    (folder / ROWS).write_text('{"id": "q"}\n')
    with pytest.raises(InvalidOption, match="rows.jsonl, line 1 is broken.*--fresh starts over"):
        Journal(folder, {"model": "b", "chat": True})
    (folder / RUN).write_text("{")
    with pytest.raises(InvalidOption, match="run.json is broken"):
        Journal(folder, {"model": "b", "chat": True})
    (folder / RUN).unlink()
    with pytest.raises(InvalidOption, match="has rows.jsonl but no run.json"):
        Journal(folder, {"model": "b", "chat": True})
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match="cannot be written"):
        Journal(tmp_path / "file", {})

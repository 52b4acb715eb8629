"""`benchmarks.on_gpu`, on the processor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import on_gpu
from tests.bench.running import ran, run


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_dry_run_measures_every_part(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    command = ["-m", "benchmarks", "on_gpu", "--all", "--dry-run", "--output", str(file)]
    done = subprocess.run([sys.executable, *command], cwd=on_gpu.ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = rows_in(file)
    assert not [row for row in rows if "error" in row or "skipped" in row]
    parts = ["first", "where", "ingest", "later", "answers", "tests"]  # most important first
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(on_gpu.PARTS) == parts
    assert sum(limit for limit, _ in on_gpu.PARTS.values()) <= 590, "they end in ten minutes"
    of_first = [row for row in rows if row["part"] == "first" and "where" in row]
    assert [row["where"] for row in of_first] == ["hot", "pinned", "disk", "plain"] * 2
    read = [row["bytes_read"] > 0 for row in of_first if row["where"] != "plain"]
    assert read == [False, False, True] * 2
    assert {row["over_plain"] for row in of_first if row["where"] == "plain"} == {1.0}
    later = [(row["batch"], row["steps"]) for row in rows if "steps" in row]
    assert later == [(n, name) for n in (1, 8) for name in ("plain", "ours")]
    assert [row["same"] for row in rows if "same" in row] == [4, 4]
    assert [row["exit"] for row in rows if "exit" in row] == [0], "skipped without a GPU"


def test_a_part_that_fails_or_is_too_slow_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(run: on_gpu.Run) -> Iterator[dict[str, Any]]:
        yield {"n": 1}
        raise ZeroDivisionError("by nothing")

    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(on_gpu, "PARTS", {"first": (0.01, failing), "later": (0.02, failing)})
    ran("on_gpu", "--dry-run", "--all", "--output", file)
    assert [row["error"] for row in rows_in(file)] == [
        "stopped after 0.01 s",
        "stopped after 0.02 s",
    ]
    told = ran("on_gpu", "--dry-run", "--parts", "later")
    assert '"n": 1' in told and "by nothing" in told, "rows before the failure stay"
    assert "some of first, later" in run("on_gpu", "--parts", "first,last").stderr


def test_what_fits_on_a_card_is_told_without_one():
    rows = [json.loads(line) for line in ran("on_gpu", "--parts", "paper").splitlines()]
    (found,) = (row for row in rows if (row["card_gb"], row["shape"]) == (24.0, "llama-3.1-8b"))
    # 6.98e9 weights of layers in 4.5 bits, 1.05e9 others in bfloat16
    assert found["weights_gb"] == 6.0 and found["hot_gb"] == 1.7
    assert found["answer_tokens"] == pytest.approx(0.9 * 17.0e9 / (8 * 131_072), rel=0.01)

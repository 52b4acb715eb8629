"""``samkv bench fidelity``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from samkv_integrations.cli import bench_runs
from samkv_integrations.cli.app import app
from tests.support.records import builtin


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "fidelity", *map(str, arguments)])


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = command("--questions", "3", "--documents", "2", "--tokens", "4", "--part", "choose",
                   "--methods", "reuse,epic", "--recompute-ratios", "0.1", "--device", "cpu",
                   "--eviction", "none,snapkv", "--output", tmp_path / "run",
                   "--json", out)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert (found["command"], found["left_out"]) == ("bench fidelity", {"too_long": 0})
    assert (found["settings"]["part"], found["settings"]["tokens"]) == ("choose", 4)
    rows = [line for line in found["rows"] if line["kind"] == "all"]
    assert [line["label"] for line in rows] == [
        "recompute", "reuse", "reuse + snapkv", "epic, 10 % recomputed",
        "epic, 10 % recomputed + snapkv",
    ]  # fmt: skip
    assert {line["questions"] for line in rows} == {3}
    assert (rows[0]["kl"], rows[0]["top1"], rows[0]["kl_of_reuse"]) == (0, 1, 0)
    assert rows[1]["kl_of_reuse"] == rows[1]["top1_of_reuse"] == 1
    # what is evicted is gone from the second token on
    assert rows[2]["first_kl"] == rows[1]["first_kl"] and rows[2]["kl"] > rows[1]["kl"]
    assert done.stdout.startswith("## All questions\n\n| label | first KL |")
    assert "3 questions; left out: 0 too long" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--part", "test"], "unknown part 'test'; known: all, choose, report"),
        (["--tokens", "0"], "tokens=0; it must be at least 1"),
        (["--questions", "0"], "questions=0; it must be at least 1"),
        (["--documents", "0"], "documents=0; it must be at least 1"),
        (["--methods", "sam"], "unknown method 'sam'; known: "),
        (["--methods", " , "], "no method is named"),
        (["--recompute-ratios", "0.1", "--methods", "reuse"], "recompute ratios do nothing"),
        (["--eviction", "forget"], "unknown eviction 'forget'"),
        (["--json", "nowhere/x.json"], "the folder nowhere of nowhere/x.json does not exist"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_runs, "load_model", None)  # calling it would be no error of ours
    done = command(*arguments)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert named in done.stderr

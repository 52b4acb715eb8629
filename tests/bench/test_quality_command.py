"""``python -m benchmarks quality``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import commands
from benchmarks.journal import RUN
from benchmarks.question_caches import QuestionCaches
from samkv_integrations.engine.chunk_prefix import LearnedPrefix
from tests.bench.asking import EVICTION, asked, written
from tests.bench.asking import quality_command as command
from tests.support.records import builtin


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three questions over the same documents, the third with a wrong answer expected."""
    return written(tmp_path / "questions.jsonl")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


@pytest.mark.slow  # all of a benchmark, whose parts have tests of their own
def test_the_command_writes_everything(file: Path, tmp_path: Path) -> None:
    out, picture, folder = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "run"
    done = command("--data", file, "--questions", "2", "--methods", "recompute,samkv-fusion",
                   "--budgets", "0.2,0.5", "--eviction", f"none,{EVICTION}@0.9", "--output", folder,
                   "--json", out, "--plot", picture, "--dtype", "float32")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert (found["command"], found["model"]) == ("benchmarks quality", "builtin")
    assert {"version", "commit", "settings"} <= set(found)
    assert set(found["hardware"]) == {"cpu", "threads", "torch", "device", "dtype"}
    assert found["left_out"] == {"too_long": 0, "not_answered": 0}
    rows = [row for row in found["rows"] if (row["kind"], row["documents"]) == ("all", None)]
    assert [row["label"] for row in rows] == [
        "recompute", f"recompute + {EVICTION}@0.9", "samkv-fusion @ 0.2", "samkv-fusion @ 0.5",
        f"samkv-fusion + {EVICTION}@0.9 @ 0.2", f"samkv-fusion + {EVICTION}@0.9 @ 0.5",
    ]  # fmt: skip
    assert [row["eviction"] for row in rows[:2]] == [None, EVICTION]
    assert rows[0]["exact_match"] == 1
    assert done.stdout.startswith("## All questions\n\n| label | f1 |")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "2 questions; left out: 0 too long" in done.stderr
    run = json.loads((folder / RUN).read_text("utf-8"))
    assert run["weights"] == builtin().weights_digest and run["hardware"] == found["hardware"]


def test_chunks_are_prefilled_after_the_prefix_that_is_named(file: Path, tmp_path: Path) -> None:
    model, path = builtin(), tmp_path / "prefix.safetensors"
    zeros = torch.zeros(4, model.config.hidden_size)
    LearnedPrefix(embeddings=zeros, weights=(model.weights_digest,)).save(path)
    names = set()
    for prefix in ("documents", "bos", str(path)):
        config, _ = asked(file, "reuse", prefix=prefix)
        names.add(config.settings(model)["prefix"])
        caches = QuestionCaches(model, config.questions, config.variants, prefix=prefix)
        with caches.engine(config.questions[0]) as engine:
            assert engine.chunks.prefix.name == config.settings(model)["prefix"]
    assert len(names) == 3
    done = command("--data", file, "--prefix", tmp_path / "none")
    assert done.exit_code == 2 and "there is no prefix" in done.stderr


@pytest.mark.slow  # the bench from end to end, three times
def test_views_of_the_paper_s_tables(file: Path, tmp_path: Path) -> None:
    common = ("--data", file, "--questions", "1", "--output")
    one = command(*common, tmp_path / "1", "--methods", "recompute,reuse", "--table1").stdout
    assert one.splitlines()[0] == "| method | sequence ratio | recomputation ratio |"
    assert "| recompute | 100.0 % | 100.0 % |" in one and "| reuse | 100.0 % | 0.0 % |" in one
    three = command(*common, tmp_path / "1", "--methods", "recompute,reuse", "--table3").stdout
    assert three.splitlines()[0] == "| method | questions | avg. |"
    assert "| recompute | 100.00 | 100.00 |" in three
    four = command(*common, tmp_path / "4", "--ablation", "--budgets", "0.3").stdout.splitlines()
    assert four[0] == "| label | method | selection | bias | recompute | questions | avg. |"
    assert four[2] == "| recompute | recompute | - | - | - | 100.00 | 100.00 |"
    assert four[3].startswith("| samkv: anchors only @ 0.3 | samkv | no | - | no | ")
    assert len(four) == 2 + 10


def test_the_folder_has_a_name_of_its_own(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for methods in ("recompute", "recompute,reuse", "recompute"):
        assert command("--data", file, "--questions", "1", "--methods", methods).exit_code == 0
    assert len(list((tmp_path / ".samkv" / "bench").iterdir())) == 2


def test_shipped_questions_are_asked_by_default(tmp_path: Path) -> None:
    done = command("--questions", "1", "--methods", "recompute", "--output", tmp_path / "run",
                   "--kinds", "two-hop", "--documents", "4", "--json", "-")  # fmt: skip
    found = json.loads(done.stdout)["rows"]
    assert {row["kind"] for row in found} == {"all", "two-hop"}
    assert {row["documents"] for row in found} == {None, 4}
    assert {row["dataset"] for row in found} == {"builtin"}


@pytest.mark.slow  # the bench from end to end, with a long prompt
def test_the_long_questions_are_asked_when_their_set_is_named(tmp_path: Path) -> None:
    done = command("--set", "long", "--questions", "1", "--methods", "recompute",
                   "--output", tmp_path / "run")  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, (tmp_path / "run" / "rows.jsonl").read_text("utf-8").splitlines())
    assert row["id"].startswith("builtin-long-")


def test_a_set_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "load_model", None)
    done = command("--set", "huge")
    assert done.exit_code == 2
    assert "unknown set of built-in questions 'huge'; known: long, short" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "sam"], "unknown method 'sam'; known: "),
        (["--methods", " , "], "no method is named"),
        (["--eviction", "forget"], "unknown eviction 'forget'"),
        (["--eviction", f"{EVICTION}@much"], "give NAME or NAME@RATIO"),
        (["--eviction", f"{EVICTION}@2"], "between 0 and 1"),
        (["--eviction", "none@0.5"], "'none' has no ratio"),
        (["--kinds", "triple-hop"], "unknown kind 'triple-hop'; known: even, odd"),
        (["--documents", "7"], "no question has 7 documents"),
        (["--documents", "few"], "give whole numbers"),
        (["--prompt", "longbench"], "unknown data set of LongBench 'questions'"),
        (["--prompt", "alpaca"], "allowed: auto, rag, longbench"),
        (["--data", "hotpot"], "unknown data 'hotpot'"),
        (["--set", "long"], "add --data builtin, or leave --set out"),
        (["--set", "huge", "--data", "builtin"], "unknown set of built-in questions 'huge'"),
        (["--budgets", "a,b"], "give numbers"),
        (["--budgets", "2"], "budgets: 2; each must be between 0 and 1"),
        (["--budgets", "nan"], "budgets: nan"),
        (["--budgets", "0.1", "--methods", "reuse"], "budgets do nothing"),
        (["--recompute-ratios", "1.5"], "recompute ratios: 1.5"),
        (["--recompute-ratios", "0.1", "--methods", "reuse"], "recompute ratios do nothing"),
        (["--questions", "0"], "questions=0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--block-size", "0"], "block_size=0"),
        (["--ablation", "--knobs"], "at most one"),
        (["--table1", "--table3"], "at most one"),
        (["--ablation", "--methods", "reuse"], "bring their own methods"),
        (["--knobs", "--budgets", "0.1,0.2"], "--knobs with --budgets 0.1,0.2; leave"),
        (["--methods", "samkv-fusion", "--budgets", "7"], "budgets: 7"),
        (["--answerable", "--methods", "reuse"], "need 'recompute'"),
        (["--plot", "x.png", "--methods", "reuse"], "--plot shows shares of 'recompute'"),
        (["--plot", "x.gif"], "it must end in .png or .svg"),
        (["--plot", "nowhere/x.png"], "the folder nowhere of nowhere/x.png does not exist"),
        (["--json", "nowhere/x.json"], "the folder nowhere of nowhere/x.json does not exist"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    file: Path, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "load_model", None)  # calling it would be no error of ours
    done = command("--data", file, *arguments)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert named in done.stderr


def test_a_broken_line_is_named_before_a_model_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "load_model", None)
    file.write_text(file.read_text("utf-8") + "{\n", encoding="utf-8")
    done = command("--data", file)
    assert done.exit_code == 2 and f"{file}, line 4: " in done.stderr


def test_a_missing_extra_is_named_before_a_model_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "load_model", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = command("--data", file, "--plot", "x.svg")
    assert done.exit_code == 2 and "'.[bench]'" in done.stderr

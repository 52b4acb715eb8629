"""The quality bench on the built-in model and few questions. Times are never asserted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from samkv_integrations import METHODS
from samkv_integrations.bench import data, markdown, plot, quality, variants
from samkv_integrations.cli import bench_commands
from samkv_integrations.cli.app import app
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.methods.guided import GuidedRecompute
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.template import rag_prompt
from tests.support.records import RECORDS, builtin

ROOT = Path(__file__).parents[2]
EVICTION = next(iter(EVICTIONS))
TIMES = re.compile(r"_s$|^ttft_ratio$|^decode_tokens_per_s$")
NAMES = "recompute,reuse,samkv-fusion,samkv-guided"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three questions over the same documents, the third with a wrong answer expected."""
    return written(tmp_path / "questions.jsonl")


def written(path: Path) -> Path:
    contexts = []
    for record in RECORDS:
        title, _, text = record.text.partition("\n")
        contexts.append({"title": title.strip("[]"), "text": text})
    lines = [
        {
            "id": f"q{index}",
            "kind": "odd" if index % 2 else "even",
            "question": RECORDS[index].question,
            "answers": [RECORDS[index].workers if index < 2 else "something else"],
            "contexts": contexts[: 5 + index % 2],
        }
        for index in range(3)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def asked(file: Path, *names: str, **options: Any) -> tuple[quality.Plan, Model]:
    plan = quality.Plan(
        questions=data.load([str(file)]),
        variants=variants.combine(names or ["recompute"]),
        **options,
    )
    return plan, builtin()


def answered(plan: quality.Plan, model: Model, folder: Path) -> quality.Result:
    with quality.Journal(folder, plan.settings(model)) as journal:
        return quality.run(plan, model, journal)


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "quality", *map(str, arguments)])


def lasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` without times, which no two runs share."""
    return [{k: v for k, v in row.items() if not TIMES.search(k)} for row in rows]


# -- what is compared -------------------------------------------------------------------------


def test_methods_meet_every_budget_and_eviction() -> None:
    made = variants.combine(
        ["recompute", "samkv-fusion"], [0.1, 0.2], evictions=[f"{EVICTION}@0.3", EVICTION]
    )
    assert list(made) == [
        "recompute",  # plain, to compare with
        f"recompute + {EVICTION}@0.3",
        f"recompute + {EVICTION}",
        *(f"samkv-fusion + {EVICTION}{at} @ {b}" for at in ("@0.3", "") for b in (0.1, 0.2)),
    ]
    one = made[f"samkv-fusion + {EVICTION}@0.3 @ 0.1"]
    assert one.method.select.max_kept_ratio == 0.1  # type: ignore[attr-defined]
    assert one.eviction is not None and one.eviction.budget_ratio == 0.3
    assert made[f"recompute + {EVICTION}"].eviction is EVICTIONS[EVICTION]
    assert made["recompute"].eviction is None
    assert list(variants.combine(["reuse", "reuse"], evictions=["none"])) == ["reuse"]


def test_without_evictions_a_method_has_its_own_and_with_none_it_has_none() -> None:
    ours = METHODS["samkv-guided"]
    assert variants.combine(["samkv-guided"])["samkv-guided"].eviction is ours.eviction is not None
    made = variants.combine(["samkv-guided"], evictions=["none", "snapkv"])
    assert list(made) == ["samkv-guided + none", "samkv-guided + snapkv"]
    assert made["samkv-guided + none"].eviction is None


def test_recompute_ratios_reach_what_recomputes_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that has none of its own among the shipped ones is made for the test."""
    partial = replace(METHODS["samkv-guided"], name="partial", recompute=GuidedRecompute(ratio=0.5))
    monkeypatch.setattr(variants, "get_method", {**METHODS, "partial": partial}.__getitem__)
    made = variants.combine(["reuse", "partial"], recompute_ratios=[0.05, 0.1])
    assert list(made) == ["reuse", "partial, 5 % recomputed", "partial, 10 % recomputed"]
    alone = GuidedRecompute(ratio=0.1, hits=None)  # no other limit
    assert made["partial, 10 % recomputed"].method.recompute == alone


def test_a_variant_is_described_the_same_in_every_process() -> None:
    texts = [variant.describe() for variant in variants.knobs().values()]
    texts += [v.describe() for v in variants.combine(list(METHODS), evictions=EVICTIONS).values()]
    assert not [text for text in texts if " at 0x" in text]
    assert len(set(variants.combine(["samkv-fusion"], [0.1, 0.2]))) == 2


def test_the_grid_is_the_paper_s_table_4() -> None:
    made, rows = variants.table4([0.3])
    assert list(made) == list(rows)
    columns = [(r.selection, r.bias, r.recompute) for r in rows.values() if r.method != "recompute"]
    fusion = [(False, None, False), (True, False, False), (True, True, False),
              (False, None, True), (True, False, True), (True, True, True)]  # fmt: skip
    assert columns == [*fusion, *fusion[3:]]  # overwrite differs where something is recomputed
    assert len({v.describe() for v in made.values()}) == len(made), "every row must be another"
    assert len(variants.table4([0.2, 0.3])[0]) == 1 + 2 * 9
    whole = made["samkv-fusion: middle, bias, recompute @ 0.3"].method
    assert variants.combine(["samkv-fusion"], [0.3])["samkv-fusion @ 0.3"].method == whole


def test_every_knob_changes_one_thing_of_the_default() -> None:
    path = variants.knobs()
    assert path["samkv-guided"] == variants.Variant.of(METHODS["samkv-guided"])
    assert len({v.describe() for v in path.values()}) == len(path), (
        "every row must change something"
    )


# -- rows and their summary -------------------------------------------------------------------


def test_rows_and_their_summary(file: Path, tmp_path: Path) -> None:
    made = variants.combine(["recompute", "reuse", "multi-infllm"], [0.3, 1.0])
    plan = quality.Plan(questions=data.load([str(file)]), variants=made)
    rows = answered(plan, builtin(), tmp_path / "run").rows
    assert [(row["id"], row["label"]) for row in rows] == [
        (q.id, label) for q in plan.questions for label in made
    ]
    assert all(row["chunk_misses"] == {} for row in rows)
    summary = quality.summarise(rows)
    assert {(row["kind"], row["documents"]) for row in summary} == {
        ("all", None), ("all", 5), ("all", 6),
        ("even", None), ("even", 5), ("odd", None), ("odd", 6),
    }  # fmt: skip
    totals = {
        row["label"]: row for row in summary if (row["kind"], row["documents"]) == ("all", None)
    }
    full = totals["recompute"]
    assert full["questions"] == 3
    assert full["f1"] == full["exact_match"] == pytest.approx(2 / 3)
    assert full["f1_low"] <= full["f1"] <= full["f1_high"]
    assert (full["same_as_recompute"], full["ttft_ratio"], full["kept_ratio"]) == (1, 1, 1)
    assert full["kv_bytes"] == full["full_kv_bytes"]
    assert totals["multi-infllm @ 1"]["kept_ratio"] == 1
    assert totals["multi-infllm @ 0.3"]["kept_ratio"] < 0.5  # anchors are kept anyway
    assert totals["multi-infllm @ 0.3"]["bytes_read"] < totals["reuse"]["bytes_read"]
    assert totals["multi-infllm @ 0.3"]["kv_bytes"] < totals["reuse"]["kv_bytes"]
    assert {row["exact_match"] for row in summary if row["label"] == "recompute"
            and row["kind"] == "odd"} == {1}  # fmt: skip
    alone = quality.summarise([row for row in rows if row["label"] == "reuse"])
    assert not {"same_as_recompute", "ttft_ratio"} & set(alone[0])
    text = markdown.quality(summary)
    for title in ("All questions", "even", "odd", "5 documents", "6 documents"):
        assert f"## {title}\n\n| label | f1 | 95 % | exact match |" in text
    assert "same as" not in markdown.quality(alone)


def test_answerable_questions_are_those_that_full_prefill_answers(
    file: Path, tmp_path: Path
) -> None:
    plan, model = asked(file, "recompute", "reuse", answerable=True)
    found = answered(plan, model, tmp_path / "run")
    assert {row["id"] for row in found.rows} == {"q0", "q1"}
    assert found.not_answered == 1
    with pytest.raises(InvalidOption, match="answerable questions need 'recompute'"):
        asked(file, "reuse", answerable=True)


def test_long_prompts_are_left_out_and_counted(file: Path, tmp_path: Path) -> None:
    model = builtin()
    lengths = [quality.prompt_tokens(model, q) for q in data.load([str(file)])]
    assert lengths[1] > max(lengths[0], lengths[2])
    plan, _ = asked(file, max_tokens=lengths[1] - 1)
    found = answered(plan, model, tmp_path / "run")
    assert ([row["id"] for row in found.rows], found.too_long) == (["q0", "q2"], 1)
    assert [row["prompt_tokens"] for row in found.rows] == [lengths[0], lengths[2]]
    plan, _ = asked(file, max_tokens=10)
    with pytest.raises(EmptyInput, match="3 of 3 are too long"):
        answered(plan, model, tmp_path / "none")


def test_tokens_are_counted_as_they_are_used(file: Path, tmp_path: Path) -> None:
    plan, model = asked(file, chat=True, most=1)
    (row,) = answered(plan, model, tmp_path / "run").rows
    assert row["prompt_tokens"] == quality.prompt_tokens(model, plan.questions[0], chat=True)


def test_what_the_window_does_not_hold_is_left_out(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model = asked(file)
    longest = max(quality.prompt_tokens(model, q) for q in plan.questions)
    monkeypatch.setattr(Model, "context_window", longest + data.ANSWER_TOKENS)
    assert answered(plan, model, tmp_path / "all").too_long == 0
    monkeypatch.setattr(Model, "context_window", longest + data.ANSWER_TOKENS - 1)
    assert answered(plan, model, tmp_path / "less").too_long == 1


def test_an_interval_holds_its_mean_and_narrows() -> None:
    low, high = quality.interval([0.0, 1.0] * 50)
    assert 0.35 < low < 0.5 < high < 0.65
    assert quality.interval([1.0, 1.0]) == (1.0, 1.0)


def test_no_answer_depends_on_those_before(file: Path, tmp_path: Path) -> None:
    """Else a run that is gone on with would end with other answers than one in one go."""
    names = ["recompute", "samkv-fusion"]
    plan, model = asked(file, *names)
    together = answered(plan, model, tmp_path / "together").rows
    settings = plan.settings(model)
    for skipped in (0, 1, 2):  # a journal that holds everything but one question
        folder = tmp_path / f"without {skipped}"
        with quality.Journal(folder, settings) as journal:
            for row in together:
                if row["id"] != f"q{skipped}":
                    journal.add(row)
            again = quality.run(plan, model, journal).rows
        assert lasting(again) == lasting(together)


# -- killed and gone on with ------------------------------------------------------------------

KILLED = """
import os, signal, sys
from samkv_integrations.bench import quality
from samkv_integrations.cli import app

rows, half = int(sys.argv[1]), int(sys.argv[2])
add = quality.Journal.add
written = 0

def add_or_die(self, row):
    global written
    if written == rows:
        if half:
            with (self.folder / quality.ROWS).open("a") as out:
                out.write('{"label": "reuse", "id": "q')
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, row)
    written += 1

quality.Journal.add = add_or_die
app(["bench", "quality", *sys.argv[3:]])
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
        path = folder / quality.ROWS
        held.append(path.read_text("utf-8").count("\n") if path.exists() else 0)
    assert held == [0, 3, 5]
    resumed = command(*arguments, "--output", folder, "--json", out)
    assert resumed.exit_code == 0, resumed.stderr
    found = json.loads(out.read_text("utf-8"))
    assert lasting(found.pop("rows")) == lasting(expected.pop("rows"))
    assert found == expected
    lines = (folder / quality.ROWS).read_text("utf-8").splitlines()
    assert len({(r["id"], r["label"]) for r in map(json.loads, lines)}) == len(lines) == 12
    before = (folder / quality.ROWS).read_bytes()
    assert command(*arguments, "--output", folder).exit_code == 0  # nothing is left to do
    assert (folder / quality.ROWS).read_bytes() == before


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    row = {"id": "q", "label": "reuse"}
    with quality.Journal(folder, {"model": "a", "chat": False}) as journal:
        journal.add(row)
    with quality.Journal(folder, {"model": "a", "chat": False}) as journal:
        assert journal.rows == {("q", "reuse"): row}
    with pytest.raises(InvalidOption, match="another chat, model; .*--output.*--fresh"):
        quality.Journal(folder, {"model": "b", "chat": True})
    with quality.Journal(folder, {"model": "b", "chat": True}, fresh=True) as journal:
        assert not journal.rows
    (folder / quality.ROWS).write_text('{"id": "q"}\n')
    with pytest.raises(InvalidOption, match="rows.jsonl, line 1 is broken.*--fresh starts over"):
        quality.Journal(folder, {"model": "b", "chat": True})
    (folder / quality.RUN).write_text("{")
    with pytest.raises(InvalidOption, match="run.json is broken"):
        quality.Journal(folder, {"model": "b", "chat": True})
    (folder / quality.RUN).unlink()
    with pytest.raises(InvalidOption, match="has rows.jsonl but no run.json"):
        quality.Journal(folder, {"model": "b", "chat": True})
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match="cannot be written"):
        quality.Journal(tmp_path / "file", {})


# -- the command ------------------------------------------------------------------------------


def test_the_command_writes_everything(file: Path, tmp_path: Path) -> None:
    out, picture, folder = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "run"
    done = command("--data", file, "--questions", "2", "--methods", "recompute,samkv-fusion",
                   "--budgets", "0.2,0.5", "--eviction", f"none,{EVICTION}@0.9", "--output", folder,
                   "--json", out, "--plot", picture, "--dtype", "float32")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert (found["command"], found["model"]) == ("bench quality", "builtin")
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
    run = json.loads((folder / quality.RUN).read_text("utf-8"))
    assert run["weights"] == builtin().weights_digest and run["hardware"] == found["hardware"]


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


def test_the_long_questions_are_asked_when_their_set_is_named(tmp_path: Path) -> None:
    done = command("--set", "long", "--questions", "1", "--methods", "recompute",
                   "--output", tmp_path / "run")  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, (tmp_path / "run" / "rows.jsonl").read_text("utf-8").splitlines())
    assert row["id"].startswith("builtin-long-")


def test_a_set_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_commands, "load_model", None)
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
        (["--questions", "0"], "most=0"),
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
    monkeypatch.setattr(bench_commands, "load_model", None)  # calling it would be no error of ours
    done = command("--data", file, *arguments)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert named in done.stderr


def test_a_broken_line_is_named_before_a_model_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_commands, "load_model", None)
    file.write_text(file.read_text("utf-8") + "{\n", encoding="utf-8")
    done = command("--data", file)
    assert done.exit_code == 2 and f"{file}, line 4: " in done.stderr


def test_a_missing_extra_is_named_before_a_model_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_commands, "load_model", None)
    for package, arguments in (("scipy.stats", []), ("matplotlib", ["--plot", "x.svg"])):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            done = command("--data", file, *arguments)
        assert done.exit_code == 2 and "samkv-integrations[bench]" in done.stderr


# -- the picture ------------------------------------------------------------------------------


def total(label: str, f1: float, kept: float, ttft: float) -> dict[str, Any]:
    return {"label": label, "f1": f1, "kept_ratio": kept, "ttft_ratio": ttft,
            "kv_bytes": 10 * kept, "full_kv_bytes": 10}  # fmt: skip


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    rows = [total("recompute", 0.9, 1, 1), total("reuse", 0.9, 1, 0.3),
            total("reuse 2", 0.9, 1, 0.3),
            *(total(f"samkv-guided @ {b}", 0.7 + b, b, 0.3) for b in (0.1, 0.2))]  # fmt: skip
    plot.draw(rows, tmp_path / name, "a title")
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins)
    if name.endswith(".svg"):
        for text in ("samkv-guided @ 0.1", "samkv-guided", "reuse 2", "a title", "kept ratio"):
            assert f"<!-- {text} -->" in content.decode()


def test_a_prompt_of_records_is_the_command_line_s(file: Path) -> None:
    question = data.load([str(file)])[0]
    assert question.prompt() == rag_prompt(question.question, question.documents)
    assert question.documents[0] == RECORDS[0].text

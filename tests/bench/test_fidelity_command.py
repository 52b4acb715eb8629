"""``python -m benchmarks fidelity``."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

from benchmarks import commands, fidelity
from benchmarks.fidelity import part_of
from samkv_integrations.model.model import Model
from tests.bench.running import run
from tests.support.models import byte_tokenizer, hf_model
from tests.support.records import RECORDS, TEXTS, builtin


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


def command(*arguments: str | Path) -> Result:
    return run("fidelity", *arguments)


@pytest.mark.slow  # all of a benchmark, whose parts have tests of their own
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = command("--questions", "3", "--documents", "2", "--tokens", "4", "--part", "choose",
                   "--methods", "reuse,epic", "--recompute-ratios", "0.1", "--device", "cpu",
                   "--eviction", "none,snapkv", "--output", tmp_path / "run",
                   "--json", out)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert (found["command"], found["left_out"]) == ("benchmarks fidelity", {"too_long": 0})
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


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Name, dtype, and how many models of before were there, of each tiny model of a command."""
    calls: list[tuple[str, str, int]] = []
    made: list[weakref.ref[Model]] = []

    def load(name: str, *, device: str, dtype: str) -> Model:
        calls.append((name, dtype, sum(model() is not None for model in made)))
        hf = hf_model("llama", seed=len(name))
        if dtype == "bfloat16":
            hf = hf.to(torch.bfloat16)
        model = Model(hf, byte_tokenizer(bos=True), name)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(commands, "load_model", load)
    return calls


def asked(folder: Path, *records: object) -> Path:
    path = folder / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), "utf-8")
    return path


@pytest.mark.slow  # the bench from end to end, three times
def test_several_models_one_after_the_other(
    tmp_path: Path, loaded: list[tuple[str, str, int]]
) -> None:
    own = asked(tmp_path, *({"question": r.question, "documents": TEXTS[:2]} for r in RECORDS[:1]))
    out, plot, folder = tmp_path / "out.json", tmp_path / "out.svg", tmp_path / "run"
    how = ["--data", own, "--tokens", "2", "--methods", "reuse", "--store-bits", "8,4,8",
           "--floor", "--json", out]  # fmt: skip
    done = command("--model", "a/one", "--model", "three", *how, "--plot", plot,
                   "--output", folder)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert loaded == [(n, d, 0) for n in ("a/one", "three") for d in ("auto", "bfloat16")]
    found = json.loads(out.read_text("utf-8"))
    labels = ["recompute", "recompute, bfloat16", "reuse, 8 bits", "reuse, 4 bits"]
    assert [(row["model"], row["label"]) for row in found["rows"] if row["kind"] == "all"] == [
        (model, label) for model in ("a/one", "three") for label in labels
    ]
    assert found["model"] is None and found["settings"]["three"]["floor"] == "bfloat16"
    assert {row["questions"] for row in found["rows"]} == {1}
    assert done.stdout.startswith("## All questions\n\n| model | label | first KL |")
    assert "answer LLR" not in done.stdout and "answer_llr" not in found["rows"][0]
    drawn = plot.read_text("utf-8")
    for text in ("a/one", "three, floor", "reuse, 8 bits"):
        assert f"<!-- {text} -->" in drawn
    assert sorted(path.name for path in folder.iterdir()) == ["a_one", "three"]
    alone = command("--model", "three", *how, "--output", tmp_path / "alone")
    assert alone.stdout.startswith("## All questions\n\n| label | first KL |")
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["kl"] for row in rows] == [
        row["kl"] for row in found["rows"] if row["model"] == "three"
    ]


@pytest.mark.slow  # the bench from end to end, three times
def test_a_fresh_run_drops_the_truths_of_an_earlier_one(
    tmp_path: Path, loaded: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be taken for its own: what the new model is measured by would be the old one's."""
    own = asked(tmp_path, {"question": RECORDS[0].question, "documents": TEXTS[:2]})
    folder, out = tmp_path / "run", tmp_path / "out.json"
    how = ["--model", "one", "--data", own, "--tokens", "2", "--methods", "reuse", "--floor",
           "--output", folder, "--json", out]  # fmt: skip
    with monkeypatch.context() as stopped:
        stopped.setattr(fidelity, "measure_floor", interrupted)
        assert isinstance(command(*how).exception, SystemExit)
    (truth,) = (folder / "truths").iterdir()
    tensors = load_file(truth)
    save_file({**tensors, "own": tensors["own"].flip(-1).contiguous()}, truth)  # another model's
    (folder / "truths" / "mine.txt").touch()
    rows = []
    for more in (["--fresh"], ["--output", tmp_path / "elsewhere"]):
        assert command(*how, *more).exit_code == 0
        rows.append(json.loads(out.read_text("utf-8"))["rows"])
    assert rows[0] == rows[1] and rows[0][1]["label"] == "recompute, bfloat16"
    assert [path.name for path in (folder / "truths").iterdir()] == ["mine.txt"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_folder_of_documents_is_asked_about(
    tmp_path: Path, loaded: list[tuple[str, str, int]]
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(TEXTS[:5]):
        (folder / f"{number}.md").write_text(text, "utf-8")
    (folder / "5.txt").write_bytes(b"\xff\xff")
    out = tmp_path / "out.json"
    how = ["--model", "one", "--data", folder, "--documents", "2", "--chunk-size", "400",
           "--tokens", "1", "--methods", "reuse", "--json", out]  # fmt: skip
    done = command(*how, "--output", tmp_path / "run")
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert {(row["kind"], row["questions"]) for row in found["rows"]} == {("all", 2), ("notes", 2)}
    assert found["settings"]["part"] == "all"
    assert "5.txt: it cannot be read as UTF-8" in done.stderr
    half = command(*how, "--part", part_of("notes:1"), "--output", tmp_path / "half")
    assert half.exit_code == 0, half.stderr
    questions = json.loads(out.read_text("utf-8"))["rows"][0]["questions"]
    assert questions == 2 - (part_of("notes:1") != part_of("notes:2"))


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
        (["--store-bits", "4,5"], "store_bits=5; allowed: 4, 8, 16"),
        (["--store-bits", ","], "--store-bits ',' names none; give 4, 8 or 16"),
        (["--store-bits", "x"], "--store-bits 'x'; give whole numbers"),
        (["--model", "a", "--model", "a"], "name each model once"),
        (["--plot", "a.pdf"], "it must end in .png or .svg"),
        (["--data", "nowhere"], "unknown data 'nowhere'; give 'builtin', a JSON Lines file, or a"),
        (
            ["--data", "."],
            "no document (.md, .txt, .csv",
        ),
        (["--eviction", "forget"], "unknown eviction 'forget'"),
        (["--json", "nowhere/x.json"], "the folder nowhere of nowhere/x.json does not exist"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "load_model", None)  # calling it would be no error of ours
    done = command(*arguments)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.output
    assert named in done.stderr

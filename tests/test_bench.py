"""The benches: scores, rows and their summary, on small data. Times are printed, never asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samkv_integrations import METHODS, Engine
from samkv_integrations.bench import latency, quality
from samkv_integrations.cli import app
from samkv_integrations.errors import EmptyInput, InvalidOption, UnknownOption
from tests.records import RECORDS

TINY = {
    "model_type": "llama",
    "vocab_size": 2752,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("builtin")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three questions over the same documents, the third with a wrong answer expected."""
    contexts = []
    for record in RECORDS:
        title, _, text = record.text.partition("\n")
        contexts.append({"title": title.strip("[]"), "text": text})
    lines = [
        {
            "id": f"q{index}",
            "kind": "single-hop",
            "set": "odd" if index % 2 else "even",
            "question": RECORDS[index].question,
            "answers": [RECORDS[index].workers if index < 2 else "something else"],
            "contexts": contexts,
        }
        for index in range(3)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("answer", "expected", "exact", "f1"),
    [
        ("The  Red Lion!", ["red lion"], 1, 1),
        ("red", ["red lion"], 0, 2 / 3),
        ("well-known", ["wellknown"], 1, 1),
        ("a cat sat", ["dog", "cat sat down"], 0, 4 / 5),
        ("", ["x"], 0, 0),
        ("x x", ["x"], 0, 2 / 3),
    ],
)
def test_scores_are_longbench_s(answer: str, expected: list[str], exact: int, f1: float) -> None:
    """Worked out by hand: lower case, punctuation and articles dropped, best of the references."""
    assert quality.exact_match(answer, expected) == exact
    assert quality.f1_score(answer, expected) == pytest.approx(f1)


def test_questions_are_read_and_filtered(file: Path) -> None:
    assert [q.id for q in quality.load_questions(file)] == ["q0", "q1", "q2"]
    assert [q.id for q in quality.load_questions(file, ["odd"])] == ["q1"]
    assert len(quality.load_questions(file, ["single-hop"])) == 3
    assert quality.load_questions(file)[0].documents[0] == RECORDS[0].text
    with pytest.raises(EmptyInput, match="kinds: two-hop"):
        quality.load_questions(file, ["two-hop"])
    file.write_text('{"id": "x"}\n')
    with pytest.raises(InvalidOption, match="line 1"):
        quality.load_questions(file)


def test_rows_and_their_summary(engine: Engine, file: Path) -> None:
    questions = quality.load_questions(file)
    methods = quality.at_budgets(["recompute", "reuse", "samkv-guided"], [0.3, 1.0])
    assert list(methods) == ["recompute", "reuse", "samkv-guided @ 0.3", "samkv-guided @ 1"]
    rows = list(quality.run(engine, questions, methods))
    assert len(rows) == 12
    assert all(row["chunk_misses"] == {} for row in rows)
    by_label = {row["label"]: row for row in quality.summarise(rows)}
    full = by_label["recompute"]
    assert full["exact_match"] == pytest.approx(2 / 3)
    assert full["exact_match_low"] <= full["exact_match"] <= full["exact_match_high"]
    assert (full["same_as_recompute"], full["ttft_ratio"], full["kept_ratio"]) == (1, 1, 1)
    assert by_label["samkv-guided @ 1"]["kept_ratio"] == 1
    assert by_label["samkv-guided @ 0.3"]["kept_ratio"] <= 0.3
    assert by_label["samkv-guided @ 0.3"]["bytes_read"] < by_label["reuse"]["bytes_read"]
    assert [q.id for q in quality.answerable(engine, questions)] == ["q0", "q1"]


def test_the_ablation_is_a_path_from_the_paper_to_the_default() -> None:
    path = quality.ablation(0.2)
    assert path["samkv-fusion"].name == "samkv-fusion"
    assert path["scores at true positions (samkv-guided)"] == METHODS["samkv-guided"]
    assert len(set(path.values())) == len(path), "every row must change something"


def test_an_interval_holds_its_mean_and_narrows() -> None:
    low, high = quality.interval([0.0, 1.0] * 50)
    assert 0.35 < low < 0.5 < high < 0.65
    assert quality.interval([1.0, 1.0]) == (1.0, 1.0)


def test_bench_quality_writes_one_object_and_rows(file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ["bench", "quality", "--questions", str(file), "--methods", "recompute,reuse"]
    done = CliRunner().invoke(app, [*arguments, "--limit", "2", "--rows", str(rows), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"] == "bench quality"
    assert [row["label"] for row in found["rows"]] == ["recompute", "reuse"]
    assert found["rows"][0]["exact_match"] == 1
    assert len(rows.read_text().splitlines()) == 4
    table = CliRunner().invoke(app, [*arguments, "--limit", "1", "--answerable"]).stdout
    assert table.startswith("| label | questions |")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "sam"], "samkv-guided"),
        (["--budgets", "a,b"], "give numbers"),
        (["--budgets", "2"], "between 0 and 1"),
    ],
)
def test_bad_options_of_bench_quality(file: Path, arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["bench", "quality", "--questions", str(file), *arguments])
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1)
    assert named in done.stderr


def test_latency_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SHAPES", {"tiny": TINY})
    config = latency.LatencyConfig(
        shape="tiny", dtype="float32", n_chunks=3, chunk_tokens=60, repeats=1
    )
    names = ("recompute", "samkv-guided")
    rows = list(latency.run(config, {name: METHODS[name] for name in names}))
    assert [row["label"] for row in rows] == list(names)
    assert rows[0]["ttft_ratio"] == 1
    assert all(row["chunk_hits"] == 3 and row["context_tokens"] >= 180 for row in rows)
    with pytest.raises(UnknownOption, match="tiny"):
        latency.LatencyConfig(shape="huge").model()

"""The quality bench on the built-in model and few questions. Times are never asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import datasets, markdown, quality, variants
from benchmarks.journal import Journal
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.text import rag_prompt
from tests.bench.asking import answered, asked, lasting
from tests.support.records import RECORDS, builtin


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


def test_rows_and_their_summary(file: Path, tmp_path: Path) -> None:
    made = variants.combine(["recompute", "reuse", "multi-infllm"], [0.3, 1.0])
    config = quality.QualityConfig(questions=datasets.load([str(file)]), variants=made)
    rows = answered(config, builtin(), tmp_path / "run").rows
    assert [(row["id"], row["label"]) for row in rows] == [
        (q.id, label) for q in config.questions for label in made
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
    config, model = asked(file, "recompute", "reuse", answerable=True)
    found = answered(config, model, tmp_path / "run")
    assert {row["id"] for row in found.rows} == {"q0", "q1"}
    assert found.not_answered == 1
    with pytest.raises(InvalidOption, match="answerable questions need 'recompute'"):
        asked(file, "reuse", answerable=True)


def test_long_prompts_are_left_out_and_counted(file: Path, tmp_path: Path) -> None:
    model = builtin()
    lengths = [len(q.prompt_ids(model)) for q in datasets.load([str(file)])]
    assert lengths[1] > max(lengths[0], lengths[2])
    config, _ = asked(file, max_tokens=lengths[1] - 1)
    found = answered(config, model, tmp_path / "run")
    assert ([row["id"] for row in found.rows], found.too_long) == (["q0", "q2"], 1)
    assert [row["prompt_tokens"] for row in found.rows] == [lengths[0], lengths[2]]
    config, _ = asked(file, max_tokens=10)
    with pytest.raises(EmptyInput, match="3 of 3 are too long"):
        answered(config, model, tmp_path / "none")


def test_tokens_are_counted_as_they_are_used(file: Path, tmp_path: Path) -> None:
    config, model = asked(file, chat=True, most=1)
    (row,) = answered(config, model, tmp_path / "run").rows
    assert row["prompt_tokens"] == len(config.questions[0].prompt_ids(model, chat=True))


def test_what_the_window_does_not_hold_is_left_out(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = asked(file)
    longest = max(len(q.prompt_ids(model)) for q in config.questions)
    monkeypatch.setattr(Model, "context_window", longest + datasets.ANSWER_TOKENS)
    assert answered(config, model, tmp_path / "all").too_long == 0
    monkeypatch.setattr(Model, "context_window", longest + datasets.ANSWER_TOKENS - 1)
    assert answered(config, model, tmp_path / "less").too_long == 1


def test_no_answer_depends_on_those_before(file: Path, tmp_path: Path) -> None:
    """Else a run that is gone on with would end with other answers than one in one go."""
    names = ["recompute", "samkv-fusion"]
    config, model = asked(file, *names)
    together = answered(config, model, tmp_path / "together").rows
    settings = config.settings(model)
    for skipped in (0, 2):  # a journal that holds everything but one question
        folder = tmp_path / f"without {skipped}"
        with Journal(folder, settings) as journal:
            for row in together:
                if row["id"] != f"q{skipped}":
                    journal.add(row)
            again = quality.run(config, model, journal).rows
        assert lasting(again) == lasting(together)


def test_a_prompt_of_records_is_the_command_line_s(file: Path) -> None:
    question = datasets.load([str(file)])[0]
    assert question.prompt() == rag_prompt(question.question, question.documents)
    assert question.documents[0] == RECORDS[0].text

"""``python -m benchmarks right_answers`` on the built-in model: rows, resumption, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import TRUTH
from benchmarks.hesitation import hesitation
from benchmarks.question_sets import PACKAGES, questions_of
from benchmarks.right_table import renamed, rows_of, summarise
from samkv_integrations.errors import InvalidOption
from tests.bench.running import ran, run

CONTEXTS = [
    {"title": "Pavel Flalvek", "text": "Pavel Flalvek was born in Nombury."},
    {"title": "Tobias Trulman", "text": "Tobias Trulman was born in Flevport."},
    {"title": "Nadine Frost", "text": "Nadine Frost was born in Orvik."},
]
QUESTIONS = [
    {"id": "one", "question": "Where was Pavel Flalvek born?", "answers": ["Nombury"]},
    {"id": "two", "question": "Where was Nadine Frost born?", "answers": ["Paris"]},
    {"id": "three", "question": "Was Nadine Frost born in Orvik?", "answers": ["yes"]},
]


def questions(folder: Path, rows: list[dict[str, Any]] = QUESTIONS) -> Path:
    file = folder / "questions.jsonl"
    lines = [json.dumps({"contexts": CONTEXTS, **row}) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def test_questions_are_asked_over_what_is_found_of_all_their_paragraphs(tmp_path: Path) -> None:
    own = [{"title": "Frost", "text": f"Nadine Frost was born in Orvik, says {n}."} for n in "ab"]
    first, second = questions(tmp_path), tmp_path / "more.jsonl"
    row = {"id": "four", "question": "Where was Frost born?", "answers": ["Orvik"]}
    second.write_text(json.dumps({"contexts": own, **row, "supporting": [1]}), encoding="utf-8")
    one, *_, four = questions_of([f"{first}+{second}@words2"])
    assert "Pavel Flalvek" in one.question.documents[0] and len(one.question.documents) == 2
    assert all("Frost" in text for text in four.question.documents)
    *_, last = questions_of([f"{first}+{second}@words2last"])
    assert last.question.documents == four.question.documents[::-1]
    hashed = questions_of([f"{first}+{second}@hashed3"])
    assert [len(each.question.documents) for each in hashed] == [3] * 4
    with pytest.raises(InvalidOption, match="several files"):
        questions_of([f"{first}+{second}@2"])


def asked(folder: Path, *more: str, methods: str = "reuse,epic first=4") -> list[str]:
    return [
        "--model", "builtin", "--dtype", "float32", "--questions", f"{questions(folder)}@3",
        "--methods", methods, "--output", str(folder / "run"), *more,
    ]  # fmt: skip


def test_every_question_counts_for_every_method(tmp_path: Path) -> None:
    shown = ran("right_answers", *asked(tmp_path))
    rows = rows_of(tmp_path / "run")
    labels = [TRUTH, "reuse", "epic first=4"]
    assert [(row["id"], row["label"]) for row in rows] == [
        (f"{row['id']}@3", label) for row in QUESTIONS for label in labels
    ]
    assert all(row["kind"] == "3 paragraphs" and row["commit"] for row in rows)
    assert [row["can_be_copied"] for row in rows[::3]] == [True, False, True]
    full, reuse, epic = summarise(rows, labels)
    assert full["questions"] == 3 and full["first"] == 1.0 and full["lost"] == full["won"] == 0
    assert full["wall"] == 1.0 and all(row["first_wall_s"] > 0 and row["threads"] for row in rows)
    assert full["kl_first"] == 0 < reuse["kl_first"]
    assert all(0 < row["entropy_first"] < 10 for row in rows)
    assert reuse["recomputed"] == 0 < epic["recomputed"]
    (plain,) = summarise(rows, [TRUTH, "reuse"])[1:]
    assert plain["label"] == "reuse"
    for row in rows:
        del row["first_wall_s"]  # as in rows of earlier commits
    assert summarise(rows, labels)[1]["wall"] is None
    assert f"| reuse | {reuse['right']} of 3 |" in shown


def test_a_run_goes_on_with_the_rows_that_are_there(tmp_path: Path) -> None:
    ran("right_answers", *asked(tmp_path, "--most", "1"))
    file = tmp_path / "run" / "rows.jsonl"
    first = file.read_text()
    with file.open("a") as half:
        half.write('{"id": "two@3", "lab')  # killed while it wrote this line
    ran("right_answers", *asked(tmp_path))
    assert file.read_text().startswith(first)
    assert len(rows_of(tmp_path / "run")) == 9
    before = file.read_text()
    ran("right_answers", *asked(tmp_path, methods="reuse"))  # nothing is left to do
    assert file.read_text() == before


def test_hesitation_counts_pairs_and_who_goes_on(tmp_path: Path) -> None:
    """The two that `reuse` loses have entropies 3 and 1, the two that it keeps 2 and 0."""
    lines = [
        {"id": str(n), "label": label, "half": "report", "right": right, "entropy_first": entropy}
        for n, (entropy, kept) in enumerate([(3.0, False), (2.0, True), (1.0, False), (0.0, True)])
        for label, right in ((TRUTH, True), ("reuse", kept))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = ran("hesitation", tmp_path)
    assert "of 2 lost and 2 kept answers" in shown and "in 0.75 of all pairs" in shown
    assert "| 0.00 | 2 | - |" in shown and "| 1.00 | 4 | - |" in shown
    assert "| 0.50 | 3 | 3.0 |" in shown  # the two of 3 and 2, one of which was lost
    with pytest.raises(InvalidOption, match="no question with 'auto'"):
        hesitation(tmp_path, then="auto")


def test_answers_have_so_many_tokens_at_most(tmp_path: Path) -> None:
    ran("right_answers", *asked(tmp_path, "--answer-tokens", "2"))
    assert max(row["tokens"] for row in rows_of(tmp_path / "run")) == 2
    refused = run("right_answers", *asked(tmp_path))
    assert refused.exit_code and "another answer_tokens" in " ".join(refused.output.split())


def test_a_label_of_one_run_can_stand_for_another(tmp_path: Path) -> None:
    ran("right_answers", *asked(tmp_path, methods="reuse,auto"))
    rows = rows_of(tmp_path / "run")
    found = renamed(rows, "run:reuse=auto")
    assert summarise(found, [TRUTH, "auto"])[1] == (
        summarise(rows, [TRUTH, "reuse"])[1] | {"label": "auto"}
    )
    assert {row["label"] for row in found} == {TRUTH, "auto"}
    with pytest.raises(InvalidOption, match="has the label"):
        renamed(rows, "run:other=auto")


@pytest.mark.slow  # splits the descriptions of a few dozen packages into chunks
def test_questions_about_packages_name_what_the_descriptions_say() -> None:
    """Written from the text: every gold answer stands in the description of its package."""
    from importlib.metadata import metadata

    from samkv_integrations.lab.evaluation import is_in_documents

    rows = [json.loads(line) for line in PACKAGES.read_text("utf-8").splitlines()]
    assert len(rows) >= 100 and len({row["package"] for row in rows}) >= 25
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        found = metadata(row["package"])
        text = str(found.get_payload() or found["Description"])
        assert all(is_in_documents([gold], [text]) for gold in row["answers"]), row
    chunked = questions_of([str(PACKAGES)])
    assert {len(one.question.documents) for one in chunked} == {4}
    assert max(len(text) for one in chunked for text in one.question.documents) <= 1000

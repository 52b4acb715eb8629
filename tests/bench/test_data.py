"""Questions of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import datasets
from reference_model.questions import main as write_questions
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.rag_template import rag_prompt

RECORD = {
    "id": "q0",
    "dataset": "town",
    "question": "Who?",
    "answers": ["Ada"],
    "contexts": [{"title": "One", "text": "It was Ada."}, {"title": "Two", "text": "No."}],
}


def written(folder: Path, *records: object, name: str = "asked.jsonl") -> str:
    path = folder / name
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_shipped_questions_are_what_the_recipe_writes(tmp_path: Path) -> None:
    """The command is the one that benchmarks/data/README.md names."""
    path = tmp_path / "questions.jsonl"
    kinds, numbers = ["single-hop", "two-hop", "reference"], ["4", "8", "12"]
    write_questions(
        ["--kind", *kinds, "--documents", *numbers, "--questions", "360", "--output", str(path)]
    )
    assert path.read_bytes() == (datasets.DATA / "questions.jsonl").read_bytes()


def test_the_shipped_long_questions_are_what_the_recipe_writes(tmp_path: Path) -> None:
    """The command is the one that benchmarks/data/README.md names."""
    path = tmp_path / "questions-long.jsonl"
    kinds, numbers = ["single-hop", "two-hop", "reference"], ["4", "6", "8"]
    write_questions(
        ["--length", "long", "--kind", *kinds, "--documents", *numbers, "--questions", "144",
         "--seed", "2", "--output", str(path)]
    )  # fmt: skip
    assert path.read_bytes() == (datasets.DATA / "questions-long.jsonl").read_bytes()
    assert path.stat().st_size < 1_500_000


def test_records_become_questions(tmp_path: Path) -> None:
    path = written(tmp_path, RECORD, "", RECORD | {"id": "q1", "set": "odd", "kind": "two-hop"})
    first, second = datasets.load(path)
    assert first.documents == ("[One]\nIt was Ada.", "[Two]\nNo.")
    assert first.prompt() == rag_prompt("Who?", first.documents)
    assert (first.kind, second.kind, first.max_new_tokens) == ("town", "odd", 16)
    assert [q.id for q in datasets.load(path, kinds=["odd"])] == ["q1"]
    assert [q.id for q in datasets.load(path, kinds=["two-hop"])] == ["q1"]
    del (unnamed := dict(RECORD))["dataset"]
    assert datasets.load(written(tmp_path, unnamed, name="my-town.jsonl"))[0].kind == "my-town"
    places = [{"supporting": value, "id": f"q{value}"} for value in ([1, 0], [], None)]
    found = datasets.load(written(tmp_path, RECORD, *(RECORD | place for place in places)))
    assert [q.supporting for q in found] == [(), (1, 0), (), ()]


def test_documents_may_stand_in_place_of_contexts(tmp_path: Path) -> None:
    bare = {name: RECORD[name] for name in ("id", "question", "answers")}
    (found,) = datasets.load(written(tmp_path, bare | {"documents": ["One. ", "Two."]}))
    assert found.documents == ("One.", "Two.")
    for documents, message in (
        ([], "documents must be a list of one text or more"),
        ("One.", "documents must be a list of one text or more"),
        (["One.", " "], "documents is ' '; it must be a text"),
    ):
        with pytest.raises(InvalidOption, match=f"asked.jsonl, line 1: {message}"):
            datasets.load(written(tmp_path, bare | {"documents": documents}))


def test_fewer_documents_keep_those_that_the_answer_needs(tmp_path: Path) -> None:
    contexts = [{"title": f"{n}", "text": "x"} for n in range(4)]
    (found,) = datasets.load(written(tmp_path, RECORD | {"contexts": contexts, "supporting": [3]}))
    two = datasets.with_fewer(found, 2)
    assert two.documents == ("[0]\nx", "[3]\nx") and two.supporting == (1,)
    assert datasets.with_fewer(found, 9) == found
    with pytest.raises(InvalidOption, match="documents=0; it must be at least 1"):
        datasets.with_fewer(found, 0)

"""Questions made of neighbouring chunks."""

from __future__ import annotations

import pytest

from benchmarks.datasets import OPENING_CHARACTERS, neighbour_questions, opening
from samkv_integrations.errors import EmptyInput, InvalidOption

CHUNKS = ["# Roads\nThey are long.", "The sea is deep. It is cold.", "Third", "Fourth", "Fifth"]


def test_each_run_of_neighbours_is_asked_about_one_of_them() -> None:
    found = neighbour_questions([*CHUNKS[:2], CHUNKS[0], *CHUNKS[2:]], 2, "docs")
    assert [question.documents for question in found] == [
        ("# Roads\nThey are long.", "The sea is deep. It is cold."),
        ("Third", "Fourth"),
    ]  # the fifth would be alone, and one chunk stood there twice
    assert [question.supporting for question in found] == [(0,), (1,)]
    assert found[0].question == "What do the documents say about this: Roads"
    assert found[1].question.endswith(": Fourth")
    assert [question.id for question in found] == ["docs:1", "docs:2"]
    assert {(question.answers, question.kind) for question in found} == {((), "docs")}
    assert [len(q.documents) for q in neighbour_questions(CHUNKS, 3, "docs")] == [3, 2]


def test_an_opening_is_a_title_or_a_sentence() -> None:
    assert opening("## A title\ntext") == "A title"
    assert opening("Is it? Yes.") == "Is it?"
    assert opening("海很深。很冷。") == "海很深"
    words = "word " * 40
    assert len(opening(words)) <= OPENING_CHARACTERS and opening(words).endswith("word")
    assert opening("海" * 200) == "海" * OPENING_CHARACTERS


def test_too_few_chunks_are_refused() -> None:
    with pytest.raises(InvalidOption, match="documents=1; it must be at least 2 for a folder"):
        neighbour_questions(CHUNKS, 1, "docs")
    with pytest.raises(EmptyInput, match="docs makes 1 chunk; give more text"):
        neighbour_questions(["one", "one"], 2, "docs")

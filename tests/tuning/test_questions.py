"""Questions that are made of chunks."""

from __future__ import annotations

import pytest

from samkv_integrations.tuning.questions import (
    before_rarest,
    from_chunks,
    split_title,
)

TOWNS = [
    "[Hesmere]\nThe markets were open for most of the year. Hesmere lies on the river Hidow.",
    "[Kronstead]\nThe markets were open for most of the year. Kronstead lies on the river Ava.",
]


def test_a_question_leaves_out_what_a_chunk_alone_says() -> None:
    asked = [question.question for question in from_chunks(TOWNS, seed=0)]
    assert set(asked[:2]) == {
        "Hesmere lies on the river ...?",
        "Kronstead lies on the river ...?",
    }
    assert {"Hesmere?", "Kronstead?"} == set(asked[-2:])


def test_chunks_take_turns_in_the_order_of_a_seed() -> None:
    many = [
        f"[Town {n}]\nTown {n} lies on the river R{n}. It has a fair in month {n}."
        for n in range(9)
    ]
    first, again, other = (
        [question.question for question in from_chunks(many, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again and first != other
    assert {question[:6] for question in first[:9]} == {f"Town {n}" for n in range(9)}
    assert len({*first}) == len(first)


@pytest.mark.parametrize(
    ("text", "title", "rest"),
    [
        ("[Hesmere]\nA town.", "Hesmere", "A town."),
        ("# Opening hours\n\nFrom nine.", "Opening hours", "\nFrom nine."),
        ("A town.\nOn a river.", "", "A town.\nOn a river."),
        ("[one line]", "one line", ""),
    ],
)
def test_titles(text: str, title: str, rest: str) -> None:
    assert split_title(text) == (title, rest)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Die Hauptstadt von Frankreich heißt Paris.", (1, "Die Hauptstadt von Frankreich heißt")),
        ("Too short.", (0, "")),
        ("...", (0, "")),
        ("北京是中华人民共和国的首都。", (1, "北京是中华人民")),
    ],
)
def test_it_asks_in_any_language(sentence: str, expected: tuple[int, str]) -> None:
    spread = {word: 9 for word in ("die", "hauptstadt", "von", "frankreich", "heißt")}
    assert before_rarest(sentence, spread) == expected

"""Questions that the model writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from samkv_integrations import Engine
from samkv_integrations.bench.journal import Journal
from samkv_integrations.errors import EmptyInput
from samkv_integrations.tuning.model_questions import (
    INSTRUCTION,
    asked_by_model,
    prompt_for,
    question_in,
)
from tests.support.models import tiny_model

TEXTS = [f"The river of town {n} is called R{n}." for n in range(4)]


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        ("Which river?\nIt is R1.", "Which river?"),
        ('\n  "Welcher Fluss?"\n', "Welcher Fluss?"),
        ("**哪条河？**", "哪条河？"),
        (' \n"\n', ""),
    ],
)
def test_the_first_line_is_the_question(answer: str, question: str) -> None:
    assert question_in(answer) == question


def test_a_chat_model_is_told_and_another_one_continues() -> None:
    chat = prompt_for("A text.", chat=True)
    assert chat == [{"role": "user", "content": f"A text.\n\n{INSTRUCTION}"}]
    plain = prompt_for("A text.", chat=False)
    assert isinstance(plain, str) and plain.startswith("Text:\nA text.") and plain.endswith(":")


@pytest.mark.parametrize("chat", [False, True])
def test_what_was_asked_once_is_not_asked_again(
    tmp_path: Path, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model())
    with Journal(tmp_path, {}) as journal:
        first = asked_by_model(engine, TEXTS, journal, seed=1, most=3, chat=chat)
    assert len(first) <= 3 and all(question.question.strip() for question in first)
    assert len({question.id for question in first}) == len(first)
    monkeypatch.setattr(Engine, "generate", None)
    with Journal(tmp_path, {}) as journal:
        assert asked_by_model(engine, TEXTS, journal, seed=1, most=3, chat=chat) == first


def test_a_model_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    engine = Engine(tiny_model())
    with Journal(tmp_path, {}) as journal:
        for text in TEXTS:
            journal.add({"id": engine.key_of(text), "label": "question", "question": ""})
        with pytest.raises(EmptyInput, match="wrote no question about 4 chunks; give some with"):
            asked_by_model(engine, TEXTS, journal, seed=1, most=9, chat=False)

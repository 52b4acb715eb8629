"""The questions of ``samkv ask`` and ``samkv quickstart``, whose documents are retrieved later."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from samkv_integrations.bench.data import Question
from samkv_integrations.documents import read_text
from samkv_integrations.errors import EmptyInput, InvalidOption


def question_of(text: str, answers: tuple[str, ...] = (), *, id: str = "1") -> Question:
    """A question of the user, without documents. answers: those that count as right, if known.

    Raises EmptyInput if there is nothing in it.
    """
    if not text.strip():
        raise EmptyInput("the question is empty; say what to ask, or give --questions FILE")
    source = "command line"
    return Question(
        id=id, dataset=source, kind=source, question=text, answers=answers, documents=()
    )


def read_questions(path: Path, *, with_documents: bool = False) -> list[Question]:
    """Questions of a JSON Lines file: ``question`` and, if they are known, ``answers``, a list.

    with_documents: whether ``documents``, a list of the texts of chunks, are read too, if given.

    Raises:
        InvalidOption: the file is missing, or a line is not such an object.
        EmptyInput: it holds no question.
    """
    questions = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is no JSON object")
            question, answers = row.get("question"), row.get("answers", [])
            if not isinstance(question, str) or not isinstance(answers, list):
                raise TypeError("question must be a string and answers a list")
            documents = _texts(row.get("documents", [])) if with_documents else ()
            if not question.strip():
                raise ValueError("the question is empty")
            for text in (question, *documents):
                text.encode()  # half a character, as JSON allows, is no text
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidOption(
                f"{path}, line {number}: {error}; each line must be a JSON object with "
                "question and, if they are known, answers"
            ) from error
        asked = question_of(question, tuple(map(str, answers)), id=str(number))
        questions.append(replace(asked, documents=documents))
    if not questions:
        raise EmptyInput(f"{path} holds no question")
    return questions


def _texts(value: object) -> tuple[str, ...]:
    """The documents of a line. Raises TypeError if they are no list of texts."""
    if not isinstance(value, list) or any(not isinstance(t, str) or not t.strip() for t in value):
        raise TypeError("documents must be a list of texts, those of cached chunks")
    return tuple(value)

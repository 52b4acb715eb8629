"""How well a method answers: questions with their documents, every method over the same ones."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samkv_integrations.chunk import normalise
from samkv_integrations.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.methods import Method
from samkv_integrations.prompt import rag_prompt

_ARTICLES = {"a", "an", "the"}
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question with the documents that are given to the model."""

    id: str
    dataset: str
    kind: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def load_questions(path: Path, kinds: Sequence[str] = ()) -> list[Question]:
    """Questions of a JSON Lines file (id, question, answers, contexts of title and text).

    kinds: keep only these values of the field ``set`` or ``kind``; empty for all. A document's text
    is its title in square brackets, a line break, and its text.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            names = {record.get("set", ""), record.get("kind", "")}
            if kinds and not names & set(kinds):
                continue
            questions.append(
                Question(
                    id=record["id"],
                    dataset=record.get("dataset", path.stem),
                    kind=record.get("set") or record.get("kind", ""),
                    question=record["question"],
                    answers=tuple(record["answers"]),
                    documents=tuple(
                        normalise(f"[{c['title']}]\n{c['text']}") for c in record["contexts"]
                    ),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidOption(
                f"{path}, line {number}: {error!r}; each line must be a JSON object with id, "
                "question, answers and contexts"
            ) from error
    if not questions:
        raise EmptyInput(f"no question in {path} (kinds: {', '.join(kinds) or 'all'})")
    return questions


def f1_words(text: str) -> list[str]:
    """Words as LongBench's qa_f1_score compares them: lower case, no punctuation, no articles."""
    return [w for w in text.lower().translate(_DROP_PUNCTUATION).split() if w not in _ARTICLES]


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer equals one of the expected ones, compared as `f1_words`."""
    return float(any(f1_words(answer) == f1_words(e) for e in expected))


def f1_score(answer: str, expected: Sequence[str]) -> float:
    """LongBench's qa_f1_score, the best over the expected answers, 0 to 1."""

    def against(reference: str) -> float:
        mine, theirs = f1_words(answer), f1_words(reference)
        common = sum((Counter(mine) & Counter(theirs)).values())
        return 2 * common / (len(mine) + len(theirs)) if common else 0.0

    return max(map(against, expected))


def run(
    engine: Engine,
    questions: Sequence[Question],
    methods: Mapping[str, Method],
    *,
    chat: bool = False,
    max_new_tokens: int = 16,
) -> Iterator[dict[str, Any]]:
    """A row for each question and method, as they finish; chunks are cached before they are timed.

    methods: label -> method; the label is the row's ``label``.
    """
    for question in questions:
        engine.cache_chunks(question.documents)
        prompt = rag_prompt(question.question, question.documents, chat=chat)
        for label, method in methods.items():
            answer = engine.generate(
                prompt, question.documents, method=method, max_new_tokens=max_new_tokens
            )
            text = answer.text.strip()
            yield {
                "label": label,
                "id": question.id,
                "dataset": question.dataset,
                "kind": question.kind,
                "question": question.question,
                "answer": text,
                "expected": list(question.answers),
                "exact_match": exact_match(text, question.answers),
                "f1": f1_score(text, question.answers),
                **answer.report.to_dict(),
            }

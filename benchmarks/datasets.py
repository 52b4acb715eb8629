"""Questions with their documents, from JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from samkv_integrations.errors import EmptyInput, InvalidOption, UnknownOption
from samkv_integrations.ingest.documents import read_text
from samkv_integrations.lab import evaluation
from samkv_integrations.store.chunk import normalise

SHORT = "short"
DATA = Path(__file__).with_name("data")
SETS: Mapping[str, Path] = {
    SHORT: DATA / "questions.jsonl",
    "long": DATA / "questions-long.jsonl",
}
"""The built-in model's questions: with documents of less than 100 tokens, and of 250 or more."""


@dataclass(frozen=True, kw_only=True)
class Question(evaluation.Question):
    """A question of a data set.

    kind: of the question; the data set where it has no kinds.
    supporting: places in ``documents`` of those that the answer needs, as far as the data say.
    max_new_tokens: of the longest answer.
    """

    kind: str
    supporting: tuple[int, ...] = ()
    max_new_tokens: int = 16


def load(source: str | Path = SHORT, *, kinds: Sequence[str] = ()) -> list[Question]:
    """The questions of one of `SETS`, or of a JSON Lines file.

    source: a line has id, question, answers, contexts (each with title and text), and maybe
        dataset, kind, set, or supporting (places in contexts). ``documents``, a list of texts, may
        stand in place of contexts: they are taken as they are.
    kinds: keep only these kinds, or values of ``set``; empty for all.

    Raises:
        InvalidOption: the file is missing or broken (with its line).
        UnknownOption: a kind that is not there.
        EmptyInput: the file holds no question.
    """
    turns = _read(SETS.get(str(source), Path(source)))
    known = set().union(*(names for _, names in turns))
    for kind in kinds:
        if kind not in known:
            raise UnknownOption.among("kind", kind, known)
    return [question for question, names in turns if not kinds or names & set(kinds)]


_NEEDED = "needed are id, question, answers and contexts of title and text"


def _read(path: Path) -> list[tuple[Question, set[str]]]:
    """Questions of a file, each with the names of its kinds."""
    if not path.exists():
        raise InvalidOption(
            f"unknown questions {str(path)!r}; give {', '.join(SETS)} or an existing JSON Lines "
            "file"
        )
    found, seen = [], set()
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("a line must be a JSON object")
            question = _of_record(record, path.stem)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidOption(f"{path}, line {number}: {_reason(error)}; {_NEEDED}") from error
        if question.id in seen:
            raise InvalidOption(f"two questions have the id {question.id!r}; ids must be unique")
        seen.add(question.id)
        found.append((question, {question.kind, *_strings(record.get("kind"), record.get("set"))}))
    if not found:
        raise EmptyInput(f"{path} holds no question")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r} is missing"
    return str(error)


def _strings(*values: object) -> set[str]:
    return {value for value in values if isinstance(value, str) and value}


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{field} is {value!r}; it must be a text")
    return value


def _answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    value = record["answers"]
    if not isinstance(value, list) or not value or not all(isinstance(a, str) for a in value):
        raise TypeError(f"answers is {value!r}; it must be a list of one text or more")
    return tuple(value)


def _of_record(record: Mapping[str, Any], stem: str) -> Question:
    dataset = record.get("dataset") or stem
    if not isinstance(dataset, str):
        raise TypeError(f"dataset is {dataset!r}; it must be a text")
    documents = _documents(record)
    return Question(
        id=_text(record, "id"),
        kind=str(record.get("set") or record.get("kind") or dataset),
        question=_text(record, "question"),
        answers=_answers(record),
        documents=documents,
        supporting=_supporting(record, len(documents)),
    )


def _documents(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The documents of a record; those with titles as the command line writes them."""
    if "contexts" not in record and "documents" in record:
        texts = record["documents"]
        if not isinstance(texts, list) or not texts:
            raise TypeError("documents must be a list of one text or more")
        return tuple(normalise(_text({"documents": text}, "documents")) for text in texts)
    contexts = record["contexts"]
    if not isinstance(contexts, list) or not contexts:
        raise TypeError("contexts must be a list of one document or more")
    bodies = []
    for context in contexts:
        if not isinstance(context, dict) or not isinstance(context["title"], str):
            raise TypeError("each of contexts must have a title and a text")
        bodies.append(normalise(f"[{context['title']}]\n{_text(context, 'text')}"))
    return tuple(bodies)


def _supporting(record: Mapping[str, Any], n_documents: int) -> tuple[int, ...]:
    value = record.get("supporting") or []
    if not isinstance(value, list) or any(place not in range(n_documents) for place in value):
        raise TypeError(f"supporting is {value!r}; it must be a list of places in contexts")
    return tuple(value)


def with_fewer(question: Question, n_documents: int) -> Question:
    """``question`` over ``n_documents`` at most, in order; supporting ones are dropped last.

    Raises InvalidOption if ``n_documents`` is not positive.
    """
    if n_documents < 1:
        raise InvalidOption(f"documents={n_documents}; it must be at least 1")
    places = dict.fromkeys([*question.supporting, *range(len(question.documents))])
    kept = sorted(islice(places, n_documents))
    return replace(
        question,
        documents=tuple(question.documents[place] for place in kept),
        supporting=tuple(kept.index(place) for place in question.supporting if place in kept),
    )

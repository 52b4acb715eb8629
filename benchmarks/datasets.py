"""Questions with their documents, and the prompts that they are asked in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.scoring import Language
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.documents import read_text
from samkv_integrations.errors import EmptyInput, InvalidOption, UnknownOption
from samkv_integrations.evaluation import questions
from samkv_integrations.evaluation.questions import ANSWER_TOKENS

PromptStyle = Literal["auto", "rag", "longbench"]

BUILTIN = "builtin"
SHORT = "short"
DATA = Path(__file__).with_name("data")
SETS: Mapping[str, Path] = {
    SHORT: DATA / "questions.jsonl",
    "long": DATA / "questions-long.jsonl",
}
"""The sets of questions that `BUILTIN` may stand for: with documents of less than 100 tokens, and
of 250 or more."""

_HEADERS: Mapping[Language, re.Pattern[str]] = {
    "en": re.compile(r"^Passage \d+:\n", re.MULTILINE),
    "zh": re.compile(r"^文章\d+\n", re.MULTILINE),
}
"""What opens a document in the files of LongBench. The English one is what public code splits at;
the Chinese one is what public excerpts of its DuReader show. Neither was seen in the files."""


@dataclass(frozen=True, kw_only=True)
class LongBenchSet:
    """How LongBench asks one of its data sets."""

    prompt: str
    max_new_tokens: int
    language: Language


@cache
def longbench() -> Mapping[str, LongBenchSet]:
    """Its multi-document question sets, by name."""
    text = (DATA / "longbench" / "prompts.json").read_text(encoding="utf-8")
    return {name: LongBenchSet(**values) for name, values in json.loads(text)["datasets"].items()}


@dataclass(frozen=True, kw_only=True)
class Question(questions.Question):
    """A question of a data set.

    kind: of the question; the data set where it has no kinds.
    context: the text that holds the documents, if the prompt is LongBench's; None for the prompt of
        the command line.
    supporting: places in ``documents`` of those that the answer needs, as far as the data say.
    """

    dataset: str
    kind: str
    context: str | None = None
    language: Language = "en"
    supporting: tuple[int, ...] = ()

    def prompt(self, *, chat: bool = False) -> str | list[dict[str, str]]:
        """The whole prompt. chat: as one user message, for a chat template."""
        if self.context is None:
            return super().prompt(chat=chat)
        template = longbench()[self.dataset].prompt
        text = template.format(context=self.context, input=self.question)
        return [{"role": "user", "content": text}] if chat else text


def load(
    sources: Sequence[str] = (BUILTIN,),
    *,
    builtin_set: str = SHORT,
    prompt: PromptStyle = "auto",
    kinds: Sequence[str] = (),
    documents: Sequence[int] = (),
    max_new_tokens: int | None = None,
    labelled: bool = True,
) -> list[Question]:
    """The questions of all ``sources``, which take turns.

    sources: ``builtin`` or JSON Lines files of either form:
        id, question, answers, contexts (each with title and text), and maybe dataset, kind, set,
            or supporting (places in contexts);
        or LongBench's own: _id, input, context, answers, dataset.
        ``documents``, a list of texts, may stand in place of contexts: they are taken as they are.
    builtin_set: which of `SETS` ``builtin`` stands for.
    prompt: ``auto`` asks LongBench's data sets as LongBench does, all others as ``rag`` does.
    kinds, documents: keep only these kinds, or values of ``set``, and numbers of documents; empty
        for all. max_new_tokens: of the answers; None for LongBench's, and 16 for others.
    labelled: whether every question must have answers and an id; without, lines are counted.

    Raises:
        InvalidOption: a file is missing or broken (with its line), or an option is wrong.
        UnknownOption: a kind, a built-in set or a data set that is not there.
        EmptyInput: no question is left.
    """
    if prompt not in get_args(PromptStyle):
        raise InvalidOption(f"prompt {prompt!r}; allowed: {', '.join(get_args(PromptStyle))}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InvalidOption(f"max_new_tokens={max_new_tokens}; it must be at least 1")
    if builtin_set not in SETS:
        raise UnknownOption.among("set of built-in questions", builtin_set, SETS)
    paths = {s: SETS[builtin_set] if s == BUILTIN else Path(s) for s in sources}
    form = _Form(prompt=prompt, max_new_tokens=max_new_tokens, labelled=labelled)
    files = [_read(path, form) for path in paths.values()]
    turns = [found for found in chain(*zip_longest(*files)) if found is not None]
    _refuse_repeats(question for question, _ in turns)
    kept = _selected(turns, kinds, documents)
    if not kept:
        wanted = ", ".join([*kinds, *(f"{n} documents" for n in documents)]) or "anything"
        raise EmptyInput(f"no question in {', '.join(sources)} is left (asked for: {wanted})")
    return kept


def _selected(
    turns: Sequence[tuple[Question, set[str]]], kinds: Sequence[str], documents: Sequence[int]
) -> list[Question]:
    """The questions of these kinds with so many documents; an empty list of either selects all."""
    known = set().union(*(names for _, names in turns)) if turns else set()
    for kind in kinds:
        if kind not in known:
            raise UnknownOption.among("kind", kind, known)
    numbers = sorted({len(question.documents) for question, _ in turns})
    for number in documents:
        if number not in numbers:
            there = ", ".join(map(str, numbers))
            raise InvalidOption(f"no question has {number} documents; there are some with {there}")
    return [
        question
        for question, names in turns
        if (not kinds or names & set(kinds))
        and (not documents or len(question.documents) in documents)
    ]


def _refuse_repeats(questions: Iterable[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InvalidOption(f"two questions have the id {question.id!r}; ids must be unique")
        seen.add(question.id)


_NEEDED = (
    "needed are id, question, answers and contexts of title and text, or LongBench's _id, input, "
    "context, answers, dataset"
)
_NEEDED_UNLABELLED = (
    "needed are question and documents, a list of texts (or contexts of title and text), or "
    "LongBench's input, context, dataset"
)


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What `load` was asked for that changes how a line is read."""

    prompt: PromptStyle
    max_new_tokens: int | None
    labelled: bool


def _read(path: Path, form: _Form) -> list[tuple[Question, set[str]]]:
    """Questions of a file, each with the names by which `load` may be asked for it."""
    if not path.exists():
        raise InvalidOption(
            f"unknown data {str(path)!r}; give {BUILTIN!r} or an existing JSON Lines file"
        )
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("a line must be a JSON object")
            if not form.labelled:
                name = f"{path.stem}:{number}"
                record = {"id": name, "_id": name, "answers": []} | record
            question = (
                _of_longbench(record, form)
                if "input" in record and "context" in record
                else _of_record(record, path.stem, form)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidOption(
                f"{path}, line {number}: {_reason(error)}; "
                f"{_NEEDED if form.labelled else _NEEDED_UNLABELLED}"
            ) from error
        except (InvalidOption, UnknownOption) as error:
            raise type(error)(f"{path}, line {number}: {error}") from error
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


def _answers(record: Mapping[str, Any], form: _Form) -> tuple[str, ...]:
    value = record["answers"]
    if not value and not form.labelled:
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(a, str) for a in value):
        raise TypeError(f"answers is {value!r}; it must be a list of one text or more")
    return tuple(value)


def _of_record(record: Mapping[str, Any], stem: str, form: _Form) -> Question:
    dataset = record.get("dataset") or stem
    if not isinstance(dataset, str):
        raise TypeError(f"dataset is {dataset!r}; it must be a text")
    known = longbench().get(dataset)
    if known is None and form.prompt == "longbench":
        raise UnknownOption.among("data set of LongBench", dataset, longbench())
    as_longbench = known is not None and form.prompt != "rag"
    language: Language = known.language if known else "en"
    bodies = _bodies(record, language if as_longbench else None)
    kind = record.get("set") or record.get("kind") or dataset
    return Question(
        id=_text(record, "id"),
        dataset=dataset,
        kind=str(kind),
        question=_text(record, "question"),
        answers=_answers(record, form),
        documents=bodies,
        context="\n".join(bodies) if as_longbench else None,
        language=language,
        max_new_tokens=form.max_new_tokens or (known.max_new_tokens if known else ANSWER_TOKENS),
        supporting=_supporting(record, len(bodies)),
    )


def _bodies(record: Mapping[str, Any], passages_in: Language | None) -> tuple[str, ...]:
    """The documents of a record, as LongBench writes them in a language, or as the command does."""
    if "contexts" not in record and "documents" in record:
        texts = record["documents"]
        if not isinstance(texts, list) or not texts:
            raise TypeError("documents must be a list of one text or more")
        return tuple(normalise(_text({"documents": text}, "documents")) for text in texts)
    contexts = record["contexts"]
    if not isinstance(contexts, list) or not contexts:
        raise TypeError("contexts must be a list of one document or more")
    bodies = []
    for number, context in enumerate(contexts, start=1):
        if not isinstance(context, dict) or not isinstance(context["title"], str):
            raise TypeError("each of contexts must have a title and a text")
        title, text = context["title"], _text(context, "text")
        bodies.append(
            _as_passage(number, title, text, passages_in)
            if passages_in
            else normalise(f"[{title}]\n{text}")
        )
    return tuple(bodies)


def _supporting(record: Mapping[str, Any], n_documents: int) -> tuple[int, ...]:
    value = record.get("supporting") or []
    if not isinstance(value, list) or any(place not in range(n_documents) for place in value):
        raise TypeError(f"supporting is {value!r}; it must be a list of places in contexts")
    return tuple(value)


def _as_passage(number: int, title: str, text: str, language: Language) -> str:
    """A document as it stands in LongBench's contexts."""
    if language == "zh":
        return normalise(f"文章{number}\n标题：{title}\n{text}")
    return normalise(f"Passage {number}:\n{title}\n{text}")


def _of_longbench(record: Mapping[str, Any], form: _Form) -> Question:
    dataset = _text(record, "dataset")
    if dataset not in longbench():
        raise UnknownOption.among("data set of LongBench", dataset, longbench())
    known = longbench()[dataset]
    context = _text(record, "context")
    starts = [match.start() for match in _HEADERS[known.language].finditer(context)]
    if not starts:
        header = _HEADERS[known.language].pattern
        raise ValueError(f"no document begins in context; each must open with {header!r}")
    ends = [*starts[1:], len(context)]
    return Question(
        id=_text(record, "_id"),
        dataset=dataset,
        kind=dataset,
        question=_text(record, "input"),
        answers=_answers(record, form),
        documents=tuple(
            normalise(context[start:end]) for start, end in zip(starts, ends, strict=True)
        ),
        context=None if form.prompt == "rag" else context,
        language=known.language,
        max_new_tokens=form.max_new_tokens or known.max_new_tokens,
    )


def with_fewer(question: Question, n_documents: int) -> Question:
    """``question`` over ``n_documents`` at most, in order; supporting ones are dropped last.

    Raises InvalidOption if ``n_documents`` is not positive.
    """
    if n_documents < 1:
        raise InvalidOption(f"documents={n_documents}; it must be at least 1")
    places = dict.fromkeys([*question.supporting, *range(len(question.documents))])
    kept = sorted(islice(places, n_documents))
    documents = tuple(question.documents[place] for place in kept)
    return replace(
        question,
        documents=documents,
        context=None if question.context is None else "\n".join(documents),
        supporting=tuple(kept.index(place) for place in question.supporting if place in kept),
    )


ASKED = "What do the documents say about this: {opening}"
"""The question. opening: how one of the chunks begins."""

OPENING_CHARACTERS = 80
"""Longest opening. Characters, as not every language parts its words."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|[。！？]|\n")


def opening(text: str) -> str:
    """The title or first sentence of a chunk, without the marks of a heading, at most so long."""
    line = _SENTENCE_END.split(text.strip().lstrip("#").strip(), maxsplit=1)[0].strip()
    if len(line) <= OPENING_CHARACTERS:
        return line
    cut = line[:OPENING_CHARACTERS]
    return cut[: cut.rfind(" ")] if " " in cut else cut


def neighbour_questions(chunks: Sequence[str], n_documents: int, name: str) -> list[Question]:
    """A question about each run of ``n_documents`` neighbouring ``chunks``, without answers.

    It asks for what one of them begins with, each place in turn. The last run may be shorter; a
    single chunk is left out, as no other stands before it. Equal chunks count once. name: of the
    data, and what ids begin with.

    Raises:
        InvalidOption: ``n_documents`` is less than 2.
        EmptyInput: there are fewer than two chunks.
    """
    if n_documents < 2:
        raise InvalidOption(
            f"documents={n_documents}; it must be at least 2 for a folder, as what is measured is "
            "what chunks lack of each other"
        )
    distinct = list(dict.fromkeys(chunks))
    runs = [distinct[at : at + n_documents] for at in range(0, len(distinct), n_documents)]
    found = []
    for number, run in enumerate(runs):
        if len(run) > 1:
            place = number % len(run)
            question = ASKED.format(opening=opening(run[place]))
            found.append(
                Question(
                    id=f"{name}:{number + 1}", dataset=name, kind=name, question=question,
                    answers=(), documents=tuple(run), supporting=(place,),
                )
            )  # fmt: skip
    if not found:
        raise EmptyInput(
            f"{name} makes {len(distinct)} chunk; give more text, or a smaller chunk size"
        )
    return found

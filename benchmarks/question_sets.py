"""The questions of the judge, with the chunks that are retrieved for them: three kinds of use.

A set is written ``FILE[@FORM][:FIRST-LAST]``. FORM says how its documents become chunks:

- a number such as ``5``: the question's own paragraphs, so many at most;
- ``512x4``: its documents joined, split as LlamaIndex does into chunks of 512 tokens, 4 retrieved;
- left out, for records that name a package: the description of the package as it is installed,
  split as LangChain does by default (1,000 characters, overlap 200); 4 retrieved from all packages
  that the file names.

Retrieval is by words (TF-IDF), so that no model has to be downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import numpy as np

from benchmarks.datasets import Question, load, with_fewer
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.ingest.documents import read_text
from samkv_integrations.lab.evaluation import is_in_documents
from samkv_integrations.store.chunk import normalise

PACKAGES = Path(__file__).with_name("data") / "packages.jsonl"
"""Questions about descriptions of packages that ``constraints.txt`` pins."""

RETRIEVED = 4
ANSWER_TOKENS = 24

STANDARD = (
    "hotpotqa.jsonl@5:1-50", "2wikimqa.jsonl@5:1-50", "musique.jsonl@5:1-50",
    "hotpotqa.jsonl@10:51-75", "2wikimqa.jsonl@10:51-75", "musique.jsonl@10:51-75",
    "musique_long.jsonl@512x4:1-55", "musique_long.jsonl@1024x2:26-80",
)  # fmt: skip
"""What ``--data FOLDER`` stands for, besides `PACKAGES`."""

_SPEC = re.compile(r"(?P<file>.+?)(?:@(?P<form>\d+(?:x\d+)?))?(?::(?P<first>\d+)-(?P<last>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question with its chunks.

    kind: of use, the same for all questions of a form. half: ``choose`` or ``report``, in turns.
    can_be_copied: whether a gold answer stands in a chunk.
    """

    question: Question
    kind: str
    half: str
    can_be_copied: bool


def questions_of(specs: Sequence[str]) -> list[Asked]:
    """The questions of all sets, whose kinds take turns so that a part of a run is of all kinds.

    Raises InvalidOption for a set that is none, a file without gold answers, or a package that is
    not installed.
    """
    sets = [_set_of(spec) for spec in specs]
    found = [(at / len(each), one) for each in sets for at, one in enumerate(each)]
    return [one for _, one in sorted(found, key=lambda each: each[0])]


def _set_of(spec: str) -> list[Asked]:
    match = _SPEC.fullmatch(spec)
    assert match is not None  # every text is a file at least
    path, form = Path(match["file"]), match["form"]
    if not path.is_file():
        raise InvalidOption(
            f"questions {spec!r}: there is no file {str(path)!r}; give FILE[@FORM][:FIRST-LAST], "
            "such as hotpotqa.jsonl@5:1-50"
        )
    first, last = int(match["first"] or 1), int(match["last"] or 10**9)
    if "package" in _first_record(path):
        kind, found = f"{RETRIEVED} x 1,000 characters", _of_packages(path)
    elif form and "x" in form:
        size, count = map(int, form.split("x"))
        kind = f"{count} x {size:,} tokens"
        found = [_split(each, size, count) for each in load(path)]
    else:
        n = int(form or 10**9)
        kind = f"{form or 'all'} paragraphs"
        found = [with_fewer(each, n) for each in load(path)]
    found = found[first - 1 : last]
    if not found:
        raise InvalidOption(f"questions {spec!r}: the file holds fewer than {first} questions")
    return [
        Asked(
            question=replace(each, id=f"{each.id}@{form or 'package'}",
                             max_new_tokens=ANSWER_TOKENS),
            kind=kind, half=("choose", "report")[at % 2],
            can_be_copied=is_in_documents(each.answers, each.documents),
        )
        for at, each in enumerate(found)
    ]  # fmt: skip


def _first_record(path: Path) -> dict[str, object]:
    line = next((line for line in read_text(path).split("\n") if line.strip()), "{}")
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidOption(f"{path}, line 1: {error}; each line must be a JSON object") from error
    return record if isinstance(record, dict) else {}


def retrieved(question: str, chunks: Sequence[str], count: int) -> tuple[str, ...]:
    """The ``count`` chunks that are nearest to a question by their rare words, nearest first."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(sublinear_tf=True).fit_transform([*chunks, question])
    nearness = (vectors[:-1] @ vectors[-1].T).toarray()[:, 0]
    return tuple(chunks[at] for at in np.argsort(-nearness, kind="stable")[:count])


def _split(question: Question, size: int, count: int) -> Question:
    try:
        from llama_index.core.node_parser import SentenceSplitter
    except ModuleNotFoundError as error:
        raise MissingExtra.of("llama_index", "llama-index") from error
    text = "\n\n".join(question.documents)
    chunks = _distinct(SentenceSplitter(chunk_size=size, chunk_overlap=0).split_text(text))
    return replace(question, documents=retrieved(question.question, chunks, count), supporting=())


def _of_packages(path: Path) -> list[Question]:
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    except ModuleNotFoundError as error:
        raise MissingExtra.of("langchain_text_splitters", "langchain") from error
    records = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
    splitter, chunks = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=200), []
    for number, record in enumerate(records, start=1):
        if not record.get("answers"):
            raise InvalidOption(f"{path}, line {number}: no answers; give one gold answer or more")
    for name in sorted({record["package"] for record in records}):
        try:
            found = metadata(name)
        except PackageNotFoundError as error:
            raise InvalidOption(
                f"{path} asks about {name!r}, which is not installed; next step: pip install "
                f"-c constraints.txt {name}"
            ) from error
        chunks += splitter.split_text(str(found.get_payload() or found["Description"] or ""))
    chunks = _distinct(chunks)
    return [
        Question(
            id=record["id"],
            kind="packages",
            question=record["question"],
            answers=tuple(record["answers"]),
            documents=retrieved(record["question"], chunks, RETRIEVED),
        )
        for record in records
    ]


def _distinct(chunks: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(normalise, chunks))))

"""The questions of the judge, with the chunks that are retrieved for them: three kinds of use.

A set is written ``FILE[@FORM][:FIRST-LAST]``. FORM says how its documents become chunks:

- a number such as ``5``: the question's own paragraphs, so many at most;
- ``512x4``: its documents joined, split as LlamaIndex does into chunks of 512 tokens, 4 retrieved;
- ``words4``: 4 of all paragraphs of the set's questions, or of all chunks of its packages, as
  ``samkv ask`` finds them by BM25, the best first; ``words4last``: the best last; ``hashed4``:
  those that are nearest by hashed words;
- left out, for records that name a package: the description of the package as it is installed,
  split as LangChain does by default (1,000 characters, overlap 200); 4 retrieved from all packages
  that the file names.

FILE may be several, joined by ``+``: FIRST-LAST are of each. Where nothing is said of it, retrieval
is by words (TF-IDF), so that no model has to be downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.datasets import Question, load, with_fewer
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.chroma.records import Records
from samkv_integrations.chroma.words import WordIndex
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

_FORM = r"\d+(?:x\d+)?|(?:words|hashed)\d+(?:last)?"
_SPEC = re.compile(rf"(?P<file>.+?)(?:@(?P<form>{_FORM}))?(?::(?P<first>\d+)-(?P<last>\d+))?")
_FOUND = re.compile(r"(?P<way>words|hashed)(?P<count>\d+)(?P<order>last)?")


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
    paths, form = [Path(name) for name in match["file"].split("+")], match["form"]
    for path in paths:
        if not path.is_file():
            raise InvalidOption(
                f"questions {spec!r}: there is no file {str(path)!r}; give "
                "FILE[+FILE][@FORM][:FIRST-LAST], such as hotpotqa.jsonl@5:1-50"
            )
    first, last = int(match["first"] or 1), int(match["last"] or 10**9)
    is_found = form and _FOUND.fullmatch(form)
    if len(paths) > 1 and not is_found:
        raise InvalidOption(f"questions {spec!r}: several files need a form such as words4")
    path = paths[0]
    if is_found:
        way, count, order = is_found.groups()
        kind = f"{count} found by {way}, best {order or 'first'}"
        if "package" in _first_record(path):
            of_packages, texts = _of_packages(path)
            asked = of_packages[first - 1 : last]
        else:
            asked = [one for path in paths for one in load(path)[first - 1 : last]]
            texts = _distinct(text for one in asked for text in one.documents)
        found = _found(asked, texts, way, int(count), order == "last")
        first, last = 1, len(asked)
    elif "package" in _first_record(path):
        kind, found = f"{RETRIEVED} x 1,000 characters", _of_packages(path)[0]
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


def _found(
    asked: Sequence[Question], texts: Sequence[str], way: str, count: int, is_last: bool
) -> list[Question]:
    """The questions, each over what is found of ``texts``. way: words or hashed."""
    vectors = HashingEmbedding().embed(texts)
    with TemporaryDirectory() as folder:
        records = Records(open_collection(folder, "paragraphs", create=True))
        ids = [str(at) for at in range(len(texts))]
        for part in records.slices(len(texts)):
            nothing = [None] * len(ids[part])
            records.write(ids[part], texts[part], vectors[part], nothing, nothing)
        index, found = WordIndex(records, None), list[Question]()
        index.count()  # makes it
        for one in asked:
            if way == "words":
                best = [text for text, _ in index.search(one.question, count).values()]
            else:
                nearness = np.array(vectors) @ HashingEmbedding().embed([one.question])[0]
                best = [texts[at] for at in np.argsort(-nearness, kind="stable")[:count]]
            best = best[::-1] if is_last else best
            places = tuple(
                best.index(one.documents[at]) for at in one.supporting if one.documents[at] in best
            )
            found.append(replace(one, documents=tuple(best), supporting=places))
    return found


def _split(question: Question, size: int, count: int) -> Question:
    try:
        from llama_index.core.node_parser import SentenceSplitter
    except ModuleNotFoundError as error:
        raise MissingExtra.of("llama_index", "llama-index") from error
    text = "\n\n".join(question.documents)
    chunks = _distinct(SentenceSplitter(chunk_size=size, chunk_overlap=0).split_text(text))
    return replace(question, documents=retrieved(question.question, chunks, count), supporting=())


def _of_packages(path: Path) -> tuple[list[Question], list[str]]:
    """The questions over what is found by TF-IDF, and the chunks of all packages."""
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
    asked = [
        Question(
            id=record["id"],
            kind="packages",
            question=record["question"],
            answers=tuple(record["answers"]),
            documents=retrieved(record["question"], chunks, RETRIEVED),
        )
        for record in records
    ]
    return asked, chunks


def _distinct(chunks: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(normalise, chunks))))

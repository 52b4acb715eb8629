"""Whether `samkv ask` finds the right paragraphs: recall and first hit, beside hashed words.

    python -m benchmarks retrieval --data FOLDER [--extra 100000]
    python -m benchmarks retrieval --data FOLDER --embedding NAME [--embedding-url URL]

With ``--embedding`` also its vectors alone, and both rankings fused. The paragraphs of all
questions are records of one collection. A question counts if its file says which paragraphs support
the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer

from benchmarks.commands import command_line, markdown_table
from benchmarks.datasets import Question, load
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.embedding import (
    EmbeddingName,
    HashingEmbedding,
    LearnedEmbedding,
    fused,
)
from samkv_integrations.chroma.records import Records
from samkv_integrations.chroma.search import DEPTH
from samkv_integrations.chroma.words import WordIndex

FILES = ("hotpotqa.jsonl", "2wikimqa.jsonl", "musique.jsonl")
TOP_K = 5
COLUMNS = ("way", "records", "questions", f"recall at {TOP_K}", "first hit", "ms a question")


def _figures(
    asked: Sequence[Question], texts: Sequence[str], find: Callable[[str], Sequence[int]]
) -> list[str]:
    """Recall, first hit and milliseconds. find: indices into ``texts``, best first."""
    recalls, firsts, times = list[float](), list[bool](), list[float]()
    for question in asked:
        gold = {question.documents[at] for at in question.supporting}
        began = time.perf_counter()
        found = [texts[at] for at in find(question.question)]
        times.append(1000 * (time.perf_counter() - began))
        recalls.append(len(gold.intersection(found)) / len(gold))
        firsts.append(bool(found) and found[0] in gold)
    return [f"{fmean(recalls):.2f}", f"{fmean(firsts):.2f}", f"{median(times):.1f}"]


def _nearest(vectors: np.ndarray, question: Sequence[float], k: int) -> list[int]:
    nearness = vectors @ np.array(question, np.float32)
    return np.argsort(-nearness, kind="stable")[:k].tolist()  # type: ignore[no-any-return]


def retrieval(
    data: Annotated[Path, typer.Option(help="A folder of hotpotqa.jsonl and the others.")],
    extra: Annotated[int, typer.Option(help="Repeat paragraphs up to so many records.")] = 0,
    embedding: Annotated[str | None, typer.Option(help="As of 'samkv ingest'.")] = None,
    embedding_url: Annotated[str | None, typer.Option(help="As of 'samkv ingest'.")] = None,
) -> None:
    """Recall and first hit of the words that `samkv ask` looks up, beside hashed words."""
    questions = [one for file in FILES for one in load(data / file)]
    asked = [one for one in questions if one.supporting]
    texts = list(dict.fromkeys(text for one in questions for text in one.documents))
    texts += [f"{texts[at % len(texts)]} {at}" for at in range(extra - len(texts))]
    ids = [str(at) for at in range(len(texts))]
    hashing = HashingEmbedding()
    vectors = np.array(hashing.embed(texts), np.float32)
    with TemporaryDirectory() as folder:
        collection = open_collection(folder, "paragraphs", create=True)
        for start in range(0, len(texts), 1000):
            part = slice(start, start + 1000)
            collection.upsert(ids=ids[part], documents=texts[part], embeddings=vectors[part])
        index = WordIndex(Records(collection), None)
        index.count()  # makes it

        def by_words(question: str) -> list[int]:
            return [int(id_) for id_ in index.search(question, TOP_K)]

        def hashed(question: str) -> list[int]:
            return _nearest(vectors, hashing.embed([question])[0], TOP_K)

        ways: dict[str, Callable[[str], Sequence[int]]]
        ways = {"words (BM25)": by_words, "hashed words": hashed}
        if embedding is not None:
            learned = LearnedEmbedding(EmbeddingName.given(embedding, embedding_url))
            began = time.perf_counter()
            parts = [learned.embed(texts[at : at + 256]) for at in range(0, len(texts), 256)]
            embedded = np.array([row for part in parts for row in part], np.float32)
            seconds = time.perf_counter() - began
            typer.echo(f"{len(texts)} texts embedded in {seconds:.0f} s", err=True)

            def near(question: str, k: int = TOP_K) -> list[int]:
                return _nearest(embedded, learned.embed_question(question), k)

            def both(question: str) -> list[int]:
                words = [id_ for id_, (_, score) in index.search(question, DEPTH).items() if score]
                return [int(id_) for id_ in fused(words, [*map(str, near(question, DEPTH))])][
                    :TOP_K
                ]

            ways |= {f"vectors ({embedding})": near, "words and vectors": both}
        counts = str(len(texts)), str(len(asked))
        rows = [[name, *counts, *_figures(asked, texts, find)] for name, find in ways.items()]
    typer.echo(markdown_table(COLUMNS, rows, left=1))


app = command_line(retrieval)
main = app

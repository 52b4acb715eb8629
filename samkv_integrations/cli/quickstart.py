"""``samkv quickstart``."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.ingest import find_documents
from samkv_integrations.cli.loading import BUILTIN, Index, Ingested
from samkv_integrations.documents import read_text
from samkv_integrations.errors import InvalidOption, MissingExtra, ModelNotFound
from samkv_integrations.formatting import Row, count, ratio, seconds

if TYPE_CHECKING:
    from rich.console import Console

    from samkv_integrations.engine.engine import Engine

FULL, DEFAULT, AGAIN = "recompute", "auto", "auto-again"
COMPARED = (FULL, "reuse", DEFAULT, AGAIN)
"""What answers every question: full prefill, caches as they are, the default (`epic`, or full
prefill where that is faster), and the default again, once there are exact beginnings."""

SMOLLM2 = "smollm2"

CHUNK_TOKENS = 512
ANSWER_TOKENS = 16

PARAGRAPHS = Path("examples/paragraphs")
ARCHIVE = Path("examples/town_archive")
"""Documents of a model that answers questions about any text, and of the built-in model."""

IN_DISTRIBUTION = """\
The built-in model was trained on questions and documents of the samples' kind. To other text it
answers nonsense with every method, full prefill included."""


def quickstart(
    model: args.ModelName = SMOLLM2, documents: args.SampleFolder = None,
    folder: args.Folder = Path(".samkv/quickstart"), as_json: args.Json = False,
) -> None:  # fmt: skip
    """The whole way: index documents, ask about them through LlamaIndex, compare the methods.

    The documents are paragraphs of Wikipedia, in chunks of 512 tokens. Without the model smollm2 it
    runs the built-in model over documents that this one can read.
    """
    from tqdm.auto import tqdm

    from samkv_integrations.engine.engine import Engine
    from samkv_integrations.evaluation import is_in_documents, is_right, read_questions

    out = tables.console(stderr=as_json)
    try:  # the connector, which alone may import LlamaIndex
        made = importlib.import_module("llama_index.llms.samkv.quickstart").Quickstart
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error.name or "llama_index", "llama-index") from error
    samples = _samples_of(model, documents)
    try:
        engine = _engine(model, folder)
    except (MissingExtra, ModelNotFound) as error:
        if model != SMOLLM2:
            raise
        model = BUILTIN
        out.print(
            f"No real model: {error}\nThis goes on with the built-in one, which is for tests."
        )
        samples = _samples_of(model, documents)
        engine = _engine(model, folder)
    texts, questions = _texts_in(samples, model), read_questions(samples / "questions.jsonl")
    # the archive's documents are shorter than a chunk
    run = made(
        engine, folder, chunk_tokens=CHUNK_TOKENS, top_k=5 if model == BUILTIN else 2,
        max_new_tokens=ANSWER_TOKENS,
    )  # fmt: skip
    n_chunks, n_cached = run.ingest(texts)
    out.print(
        f"{count(len(texts), 'document')}, {count(n_chunks, 'chunk')} in Chroma: {n_cached} "
        f"prefilled now, {n_chunks - n_cached} already cached in {folder / 'kv'}"
    )
    engine.store.delete_beginnings()  # of an earlier run
    with_beginnings = Engine(engine.model, engine.store, scheduler=engine.scheduler)
    # a first answer is slow, and an exact beginning needs a head that an earlier prompt had
    run.ask(with_beginnings, questions[0].question, "reuse")
    rows: list[Row] = []
    is_shown = False
    for one in tqdm(questions, desc="asking", leave=False):
        replies = {name: run.ask(engine, one.question, name) for name in (FULL, "reuse")}
        for name in (DEFAULT, AGAIN):
            replies[name] = run.ask(with_beginnings, one.question, DEFAULT)
            with_beginnings.make_beginnings()
        full, gold = replies[FULL], one.answers
        for name, reply in replies.items():
            rows.append({
                "question": one.question, "expected": list(gold), "answer": reply.text,
                "right": is_right(reply.text, gold) if gold else None,
                "can_be_copied": is_in_documents(gold, reply.chunks) if gold else None,
                "sources": list(reply.sources), **reply.report.to_dict(),
                "answer_s": reply.seconds, "answer_ratio": reply.seconds / full.seconds,
                "ttft_ratio": reply.report.ttft_s / full.report.ttft_s,
                "method": name,
            })  # fmt: skip
        # the first that full prefill answers; the table counts all
        if not is_shown and is_right(full.text, gold):
            is_shown = True
            with tqdm.external_write_mode():
                out.print(f"\n{one.question} (right: {gold[0]})", soft_wrap=True)
                out.print(tables.comparison_table(rows[-len(COMPARED) :]))
    if as_json:
        tables.write_json("quickstart", model, rows)
    else:
        _show(rows, len(questions), model, out)


def _engine(model: str, folder: Path) -> Engine:
    return Index(folder=folder).engine(Ingested(model=model), exact_beginnings=False)


def _samples_of(model: str, given: Path | None) -> Path:
    """The folder of the documents. Raises InvalidOption if it does not exist."""
    folder = given or (ARCHIVE if model == BUILTIN else PARAGRAPHS)
    if not folder.is_dir():
        raise InvalidOption(
            f"{folder} is not a folder; run this where the sample documents are (a checkout of "
            "the repository), or name a folder with --documents"
        )
    return folder


def _texts_in(folder: Path, model: str) -> dict[str, str]:
    """Name -> text of each document."""
    texts = {file.name: read_text(file) for file in find_documents([folder]).files}
    if folder == PARAGRAPHS and model != BUILTIN:  # so that chunks are as long as most users' are
        texts = {"paragraphs": "\n\n".join(texts[name].strip() for name in sorted(texts))}
    return texts


def _show(rows: Sequence[Row], n_questions: int, model: str, out: Console) -> None:
    n_tokens = round(fmean(row["prompt_tokens"] for row in rows))
    n_missing = sum(row["can_be_copied"] is False for row in rows if row["method"] == FULL)
    out.print(f"\n{model}, {count(n_questions, 'question')}, prompts of {n_tokens} tokens; times "
              "are medians, and their ratios to full prefill's (recompute):\n")  # fmt: skip
    cells = []
    for name in COMPARED:
        mine = [row for row in rows if row["method"] == name]
        judged = [row["right"] for row in mine if row["right"] is not None]
        cells.append((
            name, f"{sum(judged)} of {len(judged)}",
            *(f"{ratio(median(row[of_full] for row in mine))} "
              f"({seconds(median(row[key] for row in mine))})"
              for key, of_full in (("ttft_s", "ttft_ratio"), ("answer_s", "answer_ratio"))),
        ))  # fmt: skip
    titles = ("method", "right answers", "first token", "whole answer")
    out.print(tables.table(titles, cells, gap=3))
    ran = Counter(row["ran"] for row in rows if row["method"] == DEFAULT)
    out.print(
        f"\nauto: {', '.join(f'{name} for {n} of {ran.total()}' for name, n in ran.items())}.\n"
        "auto-again: the same once the first chunk has an exact beginning, made in idle time.\n"
        "Right: a gold answer stands in the answer. Every question counts, also "
        f"{n_missing} whose gold answer stands in no retrieved chunk.\n"
        "So few questions are an example; docs/results/right_answers.md has 451 on two models.",
        soft_wrap=True,
    )
    if model == BUILTIN:
        out.print(IN_DISTRIBUTION)
        return
    samkv = sys.argv[0] if Path(sys.argv[0]).name == "samkv" else "samkv"
    out.print(
        f"\nYour own folder of documents:\n  {samkv} ingest FOLDER --model {model} && "
        f'{samkv} ask "QUESTION"',
        soft_wrap=True,
    )

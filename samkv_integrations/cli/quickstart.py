"""``samkv quickstart``."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from samkv_integrations import formatting
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.ingest import find_documents
from samkv_integrations.cli.loading import BUILTIN, engine_of
from samkv_integrations.documents import read_text
from samkv_integrations.errors import InvalidOption, MissingExtra, ModelNotFound
from samkv_integrations.formatting import Row, count, ratio, seconds

if TYPE_CHECKING:
    from rich.console import Console

    from samkv_integrations.evaluation.questions import Question

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


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """Documents, name -> text, and questions about them. The rest: see `Quickstart`."""

    texts: Mapping[str, str]
    questions: Sequence[Question]
    top_k: int


def quickstart(
    model: args.ModelName = SMOLLM2,
    documents: args.SampleFolder = None,
    questions: args.SampleQuestions = None,
    folder: args.Folder = Path(".samkv/quickstart"), as_json: args.Json = False,
) -> None:  # fmt: skip
    """The whole way: index documents, ask about them through LlamaIndex, compare the methods.

    The documents are paragraphs of Wikipedia, in chunks of 512 tokens. Without the model smollm2 it
    runs the built-in model over documents that this one can read.
    """
    from tqdm.auto import tqdm

    from samkv_integrations.engine.engine import Engine
    from samkv_integrations.evaluation.judge import is_in_documents, is_right

    out = tables.console(stderr=as_json)
    samples = _samples(model, documents, questions)
    try:  # the connector, which alone may import LlamaIndex
        made = importlib.import_module("llama_index.llms.samkv.quickstart").Quickstart
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error.name or "llama_index", "llama-index") from error
    try:
        engine = engine_of(model, folder / "kv", "auto", "auto", None, exact_beginnings=False)
    except (MissingExtra, ModelNotFound) as error:
        if model != SMOLLM2:
            raise
        model = BUILTIN
        out.print(
            f"No real model: {error}\nThis goes on with the built-in one, which is for tests."
        )
        samples = _samples(model, documents, questions)
        engine = engine_of(model, folder / "kv", "auto", "auto", None, exact_beginnings=False)
    run = made(
        engine, folder, chunk_tokens=CHUNK_TOKENS, top_k=samples.top_k,
        max_new_tokens=ANSWER_TOKENS,
    )  # fmt: skip
    done = run.ingest(samples.texts)
    out.print(f"{count(len(samples.texts), 'document')}, {count(done.n_records, 'chunk')} in "
              f"Chroma: {done.n_cached} prefilled now, {done.n_hit} already cached "
              f"({seconds(done.seconds)}, {formatting.size(done.bytes_on_disk)} written to "
              f"{folder / 'kv'})")  # fmt: skip
    engine.store.delete_beginnings()  # of an earlier run
    with_beginnings = Engine(engine.model, engine.store, scheduler=engine.scheduler)
    run.engine = with_beginnings  # which has then seen the head of the prompts
    run.ask(samples.questions[0].question, "reuse")  # the first answer of a process is slow
    run.engine = engine
    rows: list[Row] = []
    shown: str | None = None
    for one in tqdm(samples.questions, desc="asking", leave=False):
        replies = {name: run.ask(one.question, name) for name in (FULL, "reuse")}
        run.engine = with_beginnings
        for name in (DEFAULT, AGAIN):
            replies[name] = run.ask(one.question, DEFAULT)
            with_beginnings.make_beginnings()
        run.engine = engine
        for name, reply in replies.items():
            full = replies[FULL]
            rows.append({
                "question": one.question, "expected": list(one.answers), "answer": reply.text,
                "right": is_right(reply.text, one.answers) if one.answers else None,
                "can_be_copied": (
                    is_in_documents(one.answers, reply.chunks) if one.answers else None
                ),
                "sources": list(reply.sources), **reply.report.to_dict(),
                "answer_s": reply.seconds, "answer_ratio": reply.seconds / full.seconds,
                "ttft_ratio": reply.report.ttft_s / full.report.ttft_s,
                "method": name,
            })  # fmt: skip
        # the first that full prefill answers; the table counts all
        if shown is None and is_right(replies[FULL].text, one.answers):
            shown = _side_by_side(one, replies)
            with tqdm.external_write_mode():
                out.print(shown, soft_wrap=True)
    if as_json:
        tables.write_json("quickstart", model, rows)
    else:
        _show(rows, len(samples.questions), model, out)


def _samples(model: str, folder: Path | None, questions: Path | None) -> _Samples:
    """Documents and questions about them: those of a folder, else those that suit the model.

    Raises InvalidOption if they are not there.
    """
    from samkv_integrations.evaluation.questions import read_questions

    is_archive = model == BUILTIN
    sample = ARCHIVE if is_archive else PARAGRAPHS
    given, folder = folder, folder or sample
    if not folder.is_dir():
        raise InvalidOption(
            f"{folder} is not a folder; run this where the sample documents are (a checkout of "
            "the repository), or name a folder with --documents"
        )
    texts = {file.name: read_text(file) for file in find_documents([folder]).files}
    if given is None and not is_archive:  # so that chunks are as long as those of most users
        texts = {"paragraphs": "\n\n".join(texts[name].strip() for name in sorted(texts))}
    return _Samples(
        texts=texts, questions=read_questions(questions or folder / "questions.jsonl"),
        top_k=5 if is_archive else 2,  # the archive's documents are shorter than a chunk
    )  # fmt: skip


def _side_by_side(question: Question, replies: Mapping[str, Any]) -> str:
    """The answers to one question by full prefill and by the default, with their times."""
    lines = ["", question.question]
    if question.answers:
        lines.append(f"  (right: {question.answers[0]})")
    for name, title in (
        (FULL, "full prefill"),
        (DEFAULT, "samkv's default"),
        (AGAIN, "asked again"),
    ):
        reply = replies[name]
        lines += [
            f"  {title}: first token {seconds(reply.report.ttft_s)}, whole answer "
            f"{seconds(reply.seconds)}",
            f"    {' '.join(reply.text.split())}",
        ]
    return "\n".join(lines)


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

"""``samkv quickstart``."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from samkv_integrations import figures
from samkv_integrations.bench.data import Question
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.answers import answer_row, with_ratios
from samkv_integrations.cli.documents import find_documents
from samkv_integrations.cli.loading import BUILTIN, use_threads_for
from samkv_integrations.cli.questions import read_questions
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.figures import Row

COMPARED = ("recompute", "reuse", "epic", "samkv-guided", "auto")
"""The methods that answer every question."""

SHOWN_QUESTIONS = 3
"""How many questions are shown with their answers."""

SHOWN_SOURCES = 3

IN_DISTRIBUTION = """\
The built-in model was trained on questions and documents of the samples' kind. To other text it
answers nonsense with every method, full prefill included."""

ALL_METHODS = """\
All methods, the paper's among them: 'samkv bench quality' compares their answers, and
'samkv bench latency' their times in the shape of a larger model."""


def quickstart(
    documents: args.SampleFolder = Path("examples/town_archive"),
    questions: args.SampleQuestions = None,
    folder: args.Folder = Path(".samkv/quickstart"), as_json: args.Json = False,
) -> None:  # fmt: skip
    """The whole way on the built-in model: index, ask through LlamaIndex, compare the methods."""
    if not documents.is_dir():
        raise InvalidOption(
            f"{documents} is not a folder; run this where the sample documents are (a checkout of "
            "the repository), or name a folder with --documents"
        )
    files = find_documents([documents]).files
    asked = read_questions(questions or documents / "questions.jsonl")
    use_threads_for(BUILTIN)
    run = _quickstart_of_llama_index()(folder)
    out = tables.console(stderr=as_json)
    done = run.ingest(files)
    out.print(f"{len(files)} documents, {done.n_records} chunks in Chroma: {done.n_cached} "
              f"prefilled now, {done.n_hit} already cached ({figures.seconds(done.seconds)}, "
              f"{figures.size(done.bytes_on_disk)} written to {folder / 'kv'})")  # fmt: skip
    run.ask(asked[0].question, COMPARED[0])  # the first pass of a process is slower than all others
    rows: list[Row] = []
    shown: list[str] = []
    for one in tqdm(asked, desc="asking"):
        replies = {name: run.ask(one.question, name) for name in COMPARED}
        rows += _rows(one, replies)
        shown += _lines(one, replies["auto"])
    out.print("\n".join(shown[: len(shown) // len(asked) * SHOWN_QUESTIONS]))
    if as_json:
        tables.write_json("quickstart", BUILTIN, rows)
    else:
        _show(rows, len(asked))


def _quickstart_of_llama_index() -> Any:  # noqa: ANN401
    """The class of the connector, which alone may import LlamaIndex."""
    try:
        return importlib.import_module("llama_index.llms.samkv.quickstart").Quickstart
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error.name or "llama_index", "llama-index") from error


def _rows(question: Question, replies: Mapping[str, Any]) -> list[Row]:
    """A row for each method. replies: method -> the connector's reply."""
    return with_ratios(
        [
            answer_row(question, reply.text, reply.sources, reply.report)
            for reply in replies.values()
        ]
    )


def _lines(question: Question, reply: Any) -> list[str]:  # noqa: ANN401
    """A question, its answer, and the documents that it comes from."""
    names = ", ".join(reply.sources[:SHOWN_SOURCES])
    return ["", question.question, f"  {reply.text.strip()}", f"  from {names}, ..."]


def _show(rows: Sequence[Row], n_questions: int) -> None:
    out = tables.console()
    n_tokens = round(mean(row["prompt_tokens"] for row in rows))
    out.print(f"\n{n_questions} questions, prompts of {n_tokens} tokens:\n")
    out.print(tables.summary_table(rows))
    ran = Counter(row["ran"] for row in rows if row["method"] == "auto").most_common()
    ways = ", ".join(f"{way} for {n} questions" for way, n in ran)
    out.print(f"\nauto, the default, ran {ways}.\n{IN_DISTRIBUTION}\n{ALL_METHODS}")

"""``samkv quickstart``."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from samkv_integrations import figures
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.ingest import find_documents
from samkv_integrations.cli.loading import BUILTIN, engine_of
from samkv_integrations.errors import InvalidOption, MissingExtra, ModelNotFound
from samkv_integrations.figures import Row, count

if TYPE_CHECKING:
    from rich.console import Console

    from samkv_integrations.evaluation.questions import Question

COMPARED = ("recompute", "reuse", "epic", "auto")
"""The methods that answer every question; the first is full prefill, the last the default."""

SMOLLM2 = "smollm2"

PARAGRAPHS = Path("examples/paragraphs")
SAMPLES = {BUILTIN: Path("examples/town_archive")}
"""Sample documents of a model; of all others `PARAGRAPHS`."""

TOP_K, MAX_NEW_TOKENS = 8, 24
"""Chunks of a prompt, and tokens of an answer, for models that read paragraphs."""

ARCHIVE_TOP_K, ARCHIVE_TOKENS = 5, 16
"""The same for the built-in model: the archive's documents are longer, its answers shorter."""

SHOWN_QUESTIONS = 3
"""How many questions are shown with their answers."""

SHOWN_SOURCES = 3

IN_DISTRIBUTION = """\
The built-in model was trained on questions and documents of the samples' kind. To other text it
answers nonsense with every method, full prefill included."""


def quickstart(
    model: args.ModelName = SMOLLM2,
    documents: args.SampleFolder = None,
    questions: args.SampleQuestions = None,
    folder: args.Folder = Path(".samkv/quickstart"), as_json: args.Json = False,
) -> None:  # fmt: skip
    """The whole way: index paragraphs, ask about them through LlamaIndex, compare the methods.

    Without the model smollm2 it runs the built-in model over documents that this one can read.
    """
    from tqdm.auto import tqdm

    from samkv_integrations.cli.answers import answer_row, with_ratios

    out = tables.console(stderr=as_json)
    files, asked = _samples(documents or SAMPLES.get(model, PARAGRAPHS), questions)
    try:  # the connector, which alone may import LlamaIndex
        made = importlib.import_module("llama_index.llms.samkv.quickstart").Quickstart
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error.name or "llama_index", "llama-index") from error
    try:
        engine = engine_of(model, folder / "kv", "auto", "auto", None)
    except (MissingExtra, ModelNotFound) as error:
        if model != SMOLLM2:
            raise
        model = BUILTIN
        out.print(
            f"No real model: {error}\nThis goes on with the built-in one, which is for tests."
        )
        files, asked = _samples(documents or SAMPLES[model], questions)
        engine = engine_of(model, folder / "kv", "auto", "auto", None)
    top_k, n_new = (ARCHIVE_TOP_K, ARCHIVE_TOKENS) if model == BUILTIN else (TOP_K, MAX_NEW_TOKENS)
    run = made(engine, folder, top_k=top_k, max_new_tokens=n_new)
    done = run.ingest(files)
    out.print(f"{count(len(files), 'document')}, {count(done.n_records, 'chunk')} in Chroma: "
              f"{done.n_cached} prefilled now, {done.n_hit} already cached "
              f"({figures.seconds(done.seconds)}, {figures.size(done.bytes_on_disk)} written to "
              f"{folder / 'kv'})")  # fmt: skip
    run.ask(asked[0].question, "reuse")  # the first answer of a process is slower than all others
    rows: list[Row] = []
    for number, one in enumerate(tqdm(asked, desc="asking")):
        replies = {name: run.ask(one.question, name) for name in COMPARED}
        rows += with_ratios(
            [answer_row(one, each.text, each.sources, each.report) for each in replies.values()]
        )
        if number < SHOWN_QUESTIONS:
            sources, lines = replies[COMPARED[-1]].sources, ["", one.question]
            lines += [
                f"  {name:10} {' '.join(each.text.split())}" for name, each in replies.items()
            ]
            lines.append(
                f"  from {', '.join(sources[:SHOWN_SOURCES])} and "
                f"{len(sources) - SHOWN_SOURCES} more"
            )
            with tqdm.external_write_mode():
                out.print("\n".join(lines), soft_wrap=True)
    if as_json:
        tables.write_json("quickstart", model, rows)
    else:
        _show(rows, len(asked), model, out)


def _samples(folder: Path, questions: Path | None) -> tuple[Sequence[Path], list[Question]]:
    """Documents of a folder, and questions about them."""
    from samkv_integrations.evaluation.questions import read_questions

    if not folder.is_dir():
        raise InvalidOption(
            f"{folder} is not a folder; run this where the sample documents are (a checkout of "
            "the repository), or name a folder with --documents"
        )
    return find_documents([folder]).files, read_questions(questions or folder / "questions.jsonl")


def _show(rows: Sequence[Row], n_questions: int, model: str, out: Console) -> None:
    n_tokens = round(mean(row["prompt_tokens"] for row in rows))
    out.print(f"\n{model}, {count(n_questions, 'question')}, prompts of {n_tokens} tokens; "
              "shares are of full prefill (recompute):\n")  # fmt: skip
    out.print(tables.speed_table(rows))
    ran = Counter(row["ran"] for row in rows if row["method"] == "auto").most_common()
    ways = ", ".join(f"{way} for {count(n, 'question')}" for way, n in ran)
    out.print(f"\nauto, the default, ran {ways}.")
    if model == BUILTIN:
        out.print(IN_DISTRIBUTION)
        return
    samkv = sys.argv[0] if Path(sys.argv[0]).name == "samkv" else "samkv"
    out.print(
        f"\nYour own folder of documents:\n  {samkv} ingest FOLDER --model {model} && "
        f'{samkv} ask "QUESTION"',
        soft_wrap=True,
    )

"""``samkv quickstart``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.arguments import BUILTIN
from samkv_integrations.cli.ask import answer_row, retrieved, with_ratios
from samkv_integrations.cli.formatting import Row, count, ratio, seconds
from samkv_integrations.cli.loading import Index, Ingested, require_model
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra, ModelNotFound
from samkv_integrations.ingest.finding import find_documents

if TYPE_CHECKING:
    from rich.console import Console

    from samkv_integrations.ingest.chunks import ChunkPage
    from samkv_integrations.runtimes.base import Runtime

FULL, DEFAULT = "recompute", "auto"
COMPARED = (FULL, "reuse", DEFAULT)
"""Methods that answer every question: full prefill, caches as they are, and the default."""

SMOLLM2 = "smollm2"

CHUNK_TOKENS = 512
ANSWER_TOKENS = 24
TOP_K, TOP_K_OF_ARCHIVE = 4, 5

PARAGRAPHS = Path("examples/paragraphs")
ARCHIVE = Path("examples/town_archive")
"""Documents of a model that answers questions about any text, and of the built-in model."""

_SAMPLES = "Folder of documents and questions.jsonl. Default: samples that suit the model."

IN_DISTRIBUTION = """\
The built-in model was trained on questions and documents of the samples' kind. To other text it
answers nonsense with every method, full prefill included."""


def quickstart(
    model: args.ModelName = SMOLLM2,
    documents: Annotated[Path | None, typer.Option(help=_SAMPLES)] = None,
    folder: args.Folder = Path(".samkv/quickstart"), as_json: args.Json = False,
) -> None:  # fmt: skip
    """The whole way: index documents, ask about them, compare the methods.

    The documents are paragraphs of Wikipedia, and easy questions about them. Without the model
    smollm2 it runs the built-in model over documents that this one can read.
    """
    require_model(model)
    samples = _samples_of(model, documents)

    from tqdm.auto import tqdm

    from samkv_integrations.chroma.embedding import HashingEmbedding
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.lab.evaluation import is_in_documents, is_right, read_questions
    from samkv_integrations.runtimes import require_runtime

    require_runtime()  # even the built-in model needs a runtime
    out = tables.console(stderr=as_json)
    index = Index(folder=folder)
    try:
        engine = index.engine(Ingested(model=model))
    except (MissingExtra, ModelNotFound) as error:
        if model != SMOLLM2:
            raise
        model = BUILTIN
        out.print(
            f"No real model: {error}\nThis goes on with the built-in one, which is for tests."
        )
        samples = _samples_of(model, documents)
        engine = index.engine(Ingested(model=model))
    read, questions = _read(samples, engine.model), read_questions(samples / "questions.jsonl")
    link = ChromaLink(index.database.collection("documents", create=True), engine)
    done = link.add(read.ids, read.texts, HashingEmbedding().embed(read.texts), read.rows)
    of_earlier_runs = set(link.collection.get(include=[])["ids"]) - set(read.ids)
    if of_earlier_runs:  # only after the ingest, so that caches of unchanged texts stay
        link.delete(sorted(of_earlier_runs))
    out.print(
        f"{count(read.n_files, 'document')}, {count(done.n_records, 'chunk')} in Chroma: "
        f"{done.n_cached} prefilled now, {done.n_hit} already cached in {folder / 'kv'}"
    )
    top_k = TOP_K_OF_ARCHIVE if model == BUILTIN else TOP_K
    # a first answer is slow
    texts, _, prompt = retrieved(link, questions[0].question, top_k, None)
    engine.generate(prompt, texts, method="reuse", max_new_tokens=ANSWER_TOKENS)
    rows: list[Row] = []
    is_shown = False
    for one in tqdm(questions, desc="asking", leave=False, disable=None):
        texts, sources, prompt = retrieved(link, one.question, top_k, None)
        gold, mine = one.answers, list[Row]()
        for name in COMPARED:
            engine.sequences.clear()  # so that no method has a cached prefix of another
            answer = engine.generate(prompt, texts, method=name, max_new_tokens=ANSWER_TOKENS)
            mine.append({
                "question": one.question, "expected": list(gold), "sources": sources,
                "right": is_right(answer.text, gold) if gold else None,
                "can_be_copied": is_in_documents(gold, texts) if gold else None,
                **answer_row(answer), "method": name,
            })  # fmt: skip
        rows += (mine := [*with_ratios(mine)])
        # the first that full prefill answers; the table counts all
        if not is_shown and mine[0]["right"]:
            is_shown = True
            with tqdm.external_write_mode():
                out.print(f"\n{one.question} (right: {gold[0]})", soft_wrap=True)
                out.print(tables.comparison_table(mine))
    if as_json:
        tables.report("quickstart", model, rows, as_json=True)
    else:
        _show(rows, len(questions), model, out)


def _samples_of(model: str, given: Path | None) -> Path:
    """The folder of the documents. Raises InvalidOption if it does not exist."""
    folder = given or (ARCHIVE if model == BUILTIN else PARAGRAPHS)
    if not folder.is_dir():
        raise InvalidOption(
            f"{folder} is not a folder; run this where the sample documents are (a checkout of "
            "the repository), or name a folder with --documents"
        )
    return folder


def _read(folder: Path, model: Runtime) -> ChunkPage:
    """The chunks of a folder. Raises EmptyInput if there is no text."""
    from samkv_integrations.ingest.chunks import ChunkReader

    files = find_documents([folder]).files
    read = ChunkReader(files, model, CHUNK_TOKENS).all()
    if not read.texts:
        raise EmptyInput(f"no text in {count(len(files), 'document')}; give some with text")
    return read


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

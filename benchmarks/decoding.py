"""Whether drafts change answers, and what a whole answer costs with and without them.

    python -m benchmarks decoding --model MODEL --data FOLDER --output RUN

Every question is answered in both ways, from the same caches. A run that was interrupted goes on.
Times are CPU seconds of whole answers, so that other work on the machine counts little; run it with
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from tqdm.auto import tqdm

from benchmarks.commands import command_line, markdown_table
from benchmarks.journal import Journal
from benchmarks.models import use_threads_for
from benchmarks.question_sets import PACKAGES, STANDARD, Asked, questions_of
from benchmarks.run_settings import hardware
from samkv_integrations.cli.formatting import Row, commit
from samkv_integrations.engine import Engine
from samkv_integrations.lab.evaluation import Paired, is_right
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.store.disk import ChunkStore

WAYS = {"no drafts": 0, "drafts": 7}
"""Label of each way -> its ``draft``."""


def _measure(engine: Engine, asked: Asked, most: int, first: int) -> list[Row]:
    question, rows = asked.question, list[Row]()
    ways = list(WAYS)
    for label in ways[first:] + ways[:first]:  # in turns, so that no way is always the first
        documents = list(question.documents)
        prompt = question.prompt(chat=engine.model.has_chat_template)
        began = time.process_time()
        answer = engine.generate(prompt, documents, max_new_tokens=most, draft=WAYS[label])
        rows.append({
            "id": question.id, "label": label, "kind": asked.kind, "text": answer.text,
            "right": is_right(answer.text, question.answers),
            "whole_s": round(time.process_time() - began, 4),
            "tokens": answer.report.completion_tokens,
            "tokens_per_step": answer.report.tokens_per_step, "commit": commit(),
        })  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each way, over the questions that were answered in every way."""
    by_id: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_id.setdefault(row["id"], {})[row["label"]] = row
    whole = [found for found in by_id.values() if len(found) == len(WAYS)]
    cells = []
    for label in WAYS:
        mine, theirs = ([each[way] for each in whole] for way in (label, "no drafts"))
        paired = Paired.of([row["right"] for row in mine], [row["right"] for row in theirs])
        same = sum(own["text"] == other["text"] for own, other in zip(mine, theirs, strict=True))
        ratio = sum(row["whole_s"] for row in mine) / sum(row["whole_s"] for row in theirs)
        steps = sum(row["tokens"] / row["tokens_per_step"] for row in mine)
        cells.append([
            label, f"{paired.right} of {len(whole)}", f"{paired.lost}, {paired.won}",
            paired.points, str(same), f"{ratio:.2f}",
            f"{fmean(row['tokens'] for row in mine):.1f}",
            f"{sum(row['tokens'] for row in mine) / steps:.2f}",
        ])  # fmt: skip
    columns = (
        "way", "right", "lost, won against no drafts", "difference, points (95 %)",
        "same text", "CPU seconds of no drafts", "tokens", "tokens a step",
    )  # fmt: skip
    return markdown_table(columns, cells, left=1)


def decoding(
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or 'smollm2'.")],
    data: Annotated[Path, typer.Option(help="A folder of hotpotqa.jsonl and the others.")],
    most: Annotated[int | None, typer.Option(help="At most so many questions.")] = None,
    tokens: Annotated[int, typer.Option(help="Of the longest answer.")] = 24,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path(".samkv/decoding"),
) -> None:
    """Whether drafts change answers, and what a whole answer costs with and without them."""
    asked = questions_of([*(str(data / spec) for spec in STANDARD), str(PACKAGES)])[:most]
    use_threads_for(model)
    loaded = Engine(load_model(model))
    settings = {"model": re.split(r"[/\\]", model)[-1], "tokens": tokens}
    with Journal(output, settings) as journal:
        typer.echo(f"{hardware(loaded.model)}", err=True)
        for number, one in enumerate(tqdm(asked, desc="asking")):
            if all((one.question.id, label) in journal.rows for label in WAYS):
                continue
            with TemporaryDirectory() as folder:
                store = ChunkStore(folder)
                engine = Engine(loaded.model, store, prefix_bytes=0, scheduler=loaded.scheduler)
                engine.cache_chunks(one.question.documents)
                for row in _measure(engine, one, tokens, number % len(WAYS)):
                    journal.add(row)
        typer.echo(table(list(journal.rows.values())))


app = command_line(decoding)
main = app

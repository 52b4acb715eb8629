"""How long an answer pauses while a long prompt of somebody else is read.

    python -m benchmarks pauses --model smollm2 --tokens 2000

An answer is streamed, and meanwhile an uncached prompt comes: with interruptions between the layers
of its pass, as always, and without them. Ways take turns; figures are medians over the rounds.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

import typer

from benchmarks.answer_grid import Texts
from benchmarks.commands import command_line, markdown_table
from benchmarks.run_settings import hardware
from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.serving import scheduler

NEW_TOKENS = 400
BEFORE = 5
"""Pieces of the answer before the long prompt comes."""


def pauses(
    model: str = "smollm2", tokens: int = typer.Option(2000, help="Of the long prompt."),
    rounds: int = 3,
) -> None:  # fmt: skip
    """The longest pause of an answer, and the first token of the long prompt."""
    loaded = load_model(model)
    loaded.end_ids = lambda more: frozenset()  # type: ignore[method-assign]
    engine, texts = Engine(loaded, prefix_bytes=0), Texts(loaded)
    least, found = scheduler.LEAST_PART_S, dict[str, list[tuple[float, float]]]()
    for _ in range(rounds):
        for way, part_s in (("between layers", least), ("after the pass", math.inf)):
            scheduler.LEAST_PART_S = part_s
            with (
                engine.stream(texts.next(64), max_new_tokens=NEW_TOKENS) as answer,
                ThreadPoolExecutor(1) as threads,
            ):
                pieces, came = iter(answer), list[float]()
                for _ in range(BEFORE):
                    next(pieces)
                asked = threads.submit(engine.generate, texts.next(tokens), max_new_tokens=1)
                while not asked.done():
                    next(pieces)
                    came.append(time.perf_counter())
                longest = max(after - before for before, after in pairwise(came))
                found.setdefault(way, []).append((longest, asked.result().report.blend_s))
    rows = [
        (way, *(f"{median(each):.2f}" for each in zip(*measured, strict=True)))
        for way, measured in found.items()
    ]
    titles = ("others go on", "longest pause, s", "pass of the long prompt, s")
    typer.echo(f"{hardware(loaded)}\n{markdown_table(titles, rows)}")


app = command_line(pauses)
main = app

"""``samkv tune``."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.formatting import count, ratio
from samkv_integrations.cli.loading import Index, Retrieval
from samkv_integrations.errors import EmptyInput

if TYPE_CHECKING:
    from samkv_integrations.store.disk import ChunkStore


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What is asked, and what a setting may lose."""

    questions: Annotated[Path, typer.Option(exists=True)]
    """JSON Lines file: question, answers, and documents if they are known."""
    lose: float = 3.0
    """Accepted loss of right answers against full prefill, in points."""
    minutes: float = 10.0
    """Most minutes of measuring."""
    writes: Annotated[bool, typer.Option("--write/--no-write")] = True
    """Write the setting beside the caches."""


LEGEND = """\
points: right answers more than full prefill, on the same questions, with 95 % interval
  (of no width: no question changed, which few questions may not show)
first token, KV: shares of full prefill's"""


def tune(index: Index, tuning: Tuning, retrieval: Retrieval, as_json: args.Json = False) -> None:
    """Find the fastest setting with as many right answers as full prefill, on your questions."""
    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.engine import Engine
    from samkv_integrations.lab.evaluation import is_in_documents, read_questions
    from samkv_integrations.lab.tuned import write_tuned
    from samkv_integrations.lab.tuning import (
        FULL,
        LEAST_QUESTIONS,
        Measurer,
        Run,
        candidates,
        recommended,
        with_documents,
    )
    from samkv_integrations.runtimes.transformers.costs import name_of

    given, lose, most = read_questions(tuning.questions), tuning.lose, retrieval.max_new_tokens
    with_gold = [one for one in given if one.has_gold]
    asked = list({(one.question, one.documents): one for one in with_gold}.values())
    if len(asked) < LEAST_QUESTIONS:
        raise EmptyInput(
            f"{tuning.questions} has {count(len(asked), 'different question')} with gold answers, "
            f"and {LEAST_QUESTIONS} are needed (3 to choose a setting, 2 to check it); add lines "
            'with "question" and "answers"'
        )
    random.Random(0).shuffle(asked)
    collection = index.collection(retrieval.collection)
    opened = index.database.collection(collection)
    as_before = index.as_ingested([(index.namespace, collection)])
    index.store()  # raises if there is none
    made = index.engine(as_before)  # whose memory would change what is measured
    engine = Engine(made.model, made.store, scheduler=made.scheduler, prefix_bytes=0)
    store = cast("ChunkStore", engine.store)
    store.require(engine.fingerprint)
    in_chat = engine.model.asks_in_chat if retrieval.chat is None else retrieval.chat
    settings = candidates(engine.model.name, engine.store_bits)
    methods = {label: setting.to_method() for label, setting in settings.items()}
    measurer = Measurer(engine, methods, max_new_tokens=most, chat=in_chat)
    run = Run(measurer.compare, lose=lose, minutes=tuning.minutes)
    typer.echo(f"Asking every setting, for up to {tuning.minutes:g} minutes ...", err=True)
    if store.note(name_of(engine.model)) is None:  # `auto` decides by what passes cost
        engine.calibrate()
    retrieved = with_documents(
        ChromaLink(opened, engine), asked, top_k=retrieval.top_k, max_new_tokens=most, chat=in_chat
    )
    result = run.tune([*settings], retrieved.questions)
    setting = recommended(result, settings, lose, collection)
    written = write_tuned(store.path, setting) if tuning.writes and setting else None
    left_out = {
        "without_answers": len(given) - len(with_gold), "repeated": len(with_gold) - len(asked),
        "too_long": retrieved.too_long, "uncached": retrieved.uncached,
    }  # fmt: skip
    n_elsewhere = sum(
        not is_in_documents(one.answers, one.documents) for one in retrieved.questions
    )
    line = setting.line if setting else f"--method {FULL}"
    more = {
        "lose": lose / 100, **left_out, "answers_in_no_document": n_elsewhere,
        "recommended": line, "why": result.why,
        "held_out": [asdict(one) for one in result.held_out],
        "written": str(written) if written else None,
    }  # fmt: skip
    told: list[Any] = []
    reasons = ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in left_out.items() if n)
    if reasons:
        told.append(f"{count(sum(left_out.values()), 'question')} left out: {reasons}.")
    if n_elsewhere:
        told.append(
            f"{count(n_elsewhere, 'question')} with answers that stand in none of the retrieved "
            "chunks, counted all the same."
        )
    titles = ("setting", "right", "full\nprefill", "points", "first\ntoken", "KV")
    for title, standings in (("Choice", result.standings), ("Held out", result.held_out)):
        cells = [
            (
                each.label, f"{each.right} of {each.questions}", str(each.full), each.points,
                ratio(each.ttft_ratio), ratio(each.kv_ratio),
            )
            for each in standings
        ]  # fmt: skip
        if cells:
            told += [f"\n{title}:", tables.table(titles, cells)]
    why = "" if setting else f": {result.why}"
    told += [LEGEND, f"\nRecommended: {line}{why}"]
    if written is not None:
        told.append(f"Written to {written}, for {as_before.model!r}; explicit arguments win.")
    rows = [asdict(one) for one in result.standings]
    tables.report("tune", as_before.model, rows, *told, as_json=as_json, more=more)

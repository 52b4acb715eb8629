"""``samkv tune``."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.formatting import count, ratio
from samkv_integrations.cli.loading import Embedded, Index, Retrieval
from samkv_integrations.errors import EmptyInput

if TYPE_CHECKING:
    from samkv_integrations.lab.tuning import Setting


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The questions to ask, and the right answers that a setting may lose."""

    questions: Annotated[
        Path,
        typer.Option(
            exists=True, help="JSON Lines file: question, answers, and documents if they are known."
        ),
    ]
    lose: Annotated[
        float,
        typer.Option(
            min=0, help="Accepted loss of right answers against full prefill, in points."
        ),
    ] = 3.0  # fmt: skip
    minutes: Annotated[float, typer.Option(min=0, help="Most minutes of measuring.")] = 10.0


LEGEND = """\
points: right answers more than full prefill, on the same questions, with 95 % interval
  (of no width: no question changed, which few questions may not show)
first token, KV: shares of full prefill's"""


def as_flags(setting: Setting) -> str:
    """A setting as flags of 'samkv ask' and 'samkv serve'."""
    flags = [f"--method {setting.method}", *(f"--set {option}" for option in setting.set)]
    flags += [f"--eviction {setting.eviction}"] if setting.eviction else []
    return " ".join([*flags, f"--store-bits {setting.store_bits}"])


def as_arguments(setting: Setting) -> str:
    """A setting as arguments of `Engine` and, without options of the method, of an LLM."""
    method = repr(setting.method)
    for option in setting.set:
        method = f"with_option(get_method({method}), {option!r})"
    words = [f"method={method}"]
    words += [f"eviction={setting.eviction!r}"] if setting.eviction else []
    return ", ".join([*words, f"store_bits={setting.store_bits}"])


def tune(
    index: Index, tuning: Tuning, retrieval: Retrieval, embedded: Embedded,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Find the fastest setting with as many right answers as full prefill, on your questions."""
    from samkv_integrations.lab.evaluation import is_in_documents, read_questions
    from samkv_integrations.lab.tuning import (
        FULL,
        LEAST_QUESTIONS,
        Measurer,
        Run,
        Setting,
        candidates,
        runs,
        with_documents,
    )

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
    index.store()  # raises if the store does not exist
    # kept sequences would change the times
    (link,) = index.links([collection], embedded.embeddings, prefix_bytes=0)
    engine = link.engine
    in_chat = engine.model.asks_in_chat if retrieval.chat is None else retrieval.chat
    settings = {
        label: each
        for label, each in candidates(engine.store_bits, engine.model.n_parameters).items()
        if runs(engine.model, each)
    }
    measurer = Measurer(engine, settings, max_new_tokens=most, chat=in_chat)
    run = Run(measurer.compare, lose=lose, minutes=tuning.minutes)
    retrieved = with_documents(
        link, asked, top_k=retrieval.top_k, max_new_tokens=most, chat=in_chat
    )
    typer.echo(f"Asking every setting, for up to {tuning.minutes:g} minutes ...", err=True)
    if engine.store.note(engine.model.costs_name) is None:  # `auto` decides by the costs of passes
        engine.calibrate()
    result = run.tune([*settings], retrieved.questions)
    full = Setting(method=FULL, store_bits=engine.store_bits)
    setting = full if result.chosen is None else settings[result.chosen.label]
    left_out = {
        "without_answers": len(given) - len(with_gold), "repeated": len(with_gold) - len(asked),
        "too_long": retrieved.too_long, "uncached": retrieved.uncached,
    }  # fmt: skip
    n_elsewhere = sum(
        not is_in_documents(one.answers, one.documents) for one in retrieved.questions
    )
    more = {
        "lose": lose / 100, **left_out, "answers_in_no_document": n_elsewhere,
        "recommended": as_flags(setting), "arguments": as_arguments(setting), "why": result.why,
        "held_out": [asdict(one) for one in result.held_out],
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
    why = f": {result.why}" if result.why else ""
    told += [
        LEGEND, f"\nRecommended: {setting.label}{why}",
        f"  for commands: {as_flags(setting)}", f"  in Python: {as_arguments(setting)}",
    ]  # fmt: skip
    rows = [asdict(one) for one in result.standings]
    tables.report("tune", engine.model.name, rows, *told, as_json=as_json, more=more)

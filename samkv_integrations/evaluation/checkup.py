"""The doctor's whole round: what `samkv_integrations.engine.doctor` checks, and right answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.engine.doctor import SAMPLES, Check, examine
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption, PromptTooLong
from samkv_integrations.evaluation.judge import is_right
from samkv_integrations.evaluation.questions import Question, read_questions
from samkv_integrations.figures import count
from samkv_integrations.model.model import Model

FURTHER_QUESTIONS = (
    ("When was the harbour of Ostmere built?", ("1874",)),
    ("What colour is the lighthouse?", ("green",)),
    ("How many trains a day run to Ostmere?", ("two", "2")),
    ("Which bread does the bakery sell?", ("rye",)),
    ("How many people does the ferry take?", ("sixty", "60")),
    ("Why is the clock of the town hall slow?", ("storm",)),
    ("What grows in the garden of the school?", ("beans",)),
)
"""With those of `SAMPLES` a dozen, and their right answers."""

METHODS = ("reuse", "epic", "samkv-guided", "auto")
"""Methods whose answers are judged beside full prefill's."""

ANSWER_TOKENS = 32
"""Longest answer that is judged."""

ONE_IN = 12
"""One right answer of so many may be lost without a warning, and is nearly nothing."""


def own_questions() -> list[Question]:
    """The doctor's own: each over all chunks of `SAMPLES`, in another rotation."""
    chunks = list(dict.fromkeys(chunk for *_, of_one in SAMPLES for chunk in of_one))
    asked = [(question, answers) for question, answers, _ in SAMPLES] + [*FURTHER_QUESTIONS]
    turns = [place % len(chunks) for place in range(len(asked))]
    return [
        Question(question=question, answers=answers, documents=(*chunks[n:], *chunks[:n]))
        for n, (question, answers) in zip(turns, asked, strict=True)
    ]


def given_questions(path: Path) -> list[Question]:
    """A user's questions. Raises as `read_questions`, and for one without answers or documents."""
    asked = read_questions(path, with_documents=True)
    for one in asked:
        for name, is_there in (("answers", one.has_gold), ("documents", bool(one.documents))):
            if not is_there:
                raise InvalidOption(
                    f"{path}, line {one.id}: no {name}; each line needs question, answers and "
                    f"documents here, so add {name} or leave the line out"
                )
    return asked


def checkup(
    model: Model, store: ChunkStore | None = None, asked: Sequence[Question] | None = None
) -> Iterator[Check]:
    """All checks of ``model``, each as soon as it is done.

    store: where the measured cost of passes is kept. asked: questions with answers and documents;
    None for the doctor's own.
    """
    bits, costs = yield from examine(model, store)
    yield right_answers(model, bits, costs, asked)


def right_answers(
    model: Model, bits: int, costs: CostModel, asked: Sequence[Question] | None = None
) -> Check:
    """How many answers of each method are right, of all questions, by chunks stored in ``bits``.

    A warning if a method has fewer than full prefill by more than one in `ONE_IN`, or if full
    prefill has at most that: then the questions cannot judge the model.

    costs: those that ``auto`` goes by. asked: as for `checkup`.
    """
    questions = own_questions() if asked is None else asked
    engine = Engine(model, store_bits=bits, prefix_bytes=0)
    engine.costs = costs
    right = dict.fromkeys(("recompute", *METHODS), 0)
    try:
        for one in questions:
            engine.cache_chunks(one.documents)
            prompt = one.prompt(chat=model.asks_in_chat)
            answer = partial(engine.generate, prompt, one.documents, max_new_tokens=ANSWER_TOKENS)
            for name in right:
                right[name] += is_right(answer(method=name).text, one.answers)
    except PromptTooLong as error:
        return Check(name="answers", ok=True, is_warning=True, detail=str(error))
    n, full = len(questions), right.pop("recompute")
    fewer = [name for name, mine in right.items() if ONE_IN * (full - mine) > n]
    is_blind = ONE_IN * full <= n
    if is_blind:
        remedy = (
            "give your own with --questions FILE" if asked is None else "ask what it can answer"
        )
        verdict = f"full prefill has nearly none, so they cannot judge this model: {remedy}"
    else:
        worse = f"{', '.join(fewer)}: fewer than full prefill; " if fewer else ""
        verdict = f"{worse}'samkv tune' counts them on your documents"
    over = "over short chunks" if asked is None else "of yours"
    counts = ", ".join(f"{name} {mine}" for name, mine in right.items())
    return Check(
        name="answers",
        ok=True,
        is_warning=bool(fewer) or is_blind,
        detail=f"right answers, of {count(n, 'question')} {over}: full prefill {full}, {counts}; "
        f"{verdict}",
    )

"""All checks of ``samkv doctor``: those of `engine.doctor`, and right answers."""

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
from samkv_integrations.formatting import count
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
"""Questions and their right answers: a dozen with those of `SAMPLES`."""

METHODS = ("reuse", "epic", "samkv-guided", "auto")
"""Methods whose right answers are counted and compared with full prefill's."""

ANSWER_TOKENS = 32
"""Longest answer that is judged."""

ONE_IN = 12
"""A method may lose one right answer in so many without a warning."""


def own_questions() -> list[Question]:
    """The built-in questions. Each is asked over all chunks of `SAMPLES`, rotated by its number."""
    chunks = list(dict.fromkeys(chunk for *_, of_one in SAMPLES for chunk in of_one))
    asked = [(question, answers) for question, answers, _ in SAMPLES] + [*FURTHER_QUESTIONS]
    turns = [place % len(chunks) for place in range(len(asked))]
    return [
        Question(question=question, answers=answers, documents=(*chunks[n:], *chunks[:n]))
        for n, (question, answers) in zip(turns, asked, strict=True)
    ]


def given_questions(path: Path) -> list[Question]:
    """The questions of a file.

    Raises InvalidOption and EmptyInput as `read_questions` does, and InvalidOption for a question
    without answers or documents.
    """
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
    """Run all checks of ``model``; yields each as soon as it is done.

    store: where the measured cost of passes is kept. asked: questions with answers and documents;
    None for the built-in ones.
    """
    bits, costs = yield from examine(model, store)
    yield right_answers(model, bits, costs, asked)


def right_answers(
    model: Model, bits: int, costs: CostModel, asked: Sequence[Question] | None = None
) -> Check:
    """Count the right answers of each method over all questions, with chunks stored in ``bits``.

    Warns if a method loses more than one right answer in `ONE_IN`. Warns as well if full prefill
    has no more right answers than that, because such questions cannot judge the model.

    costs: what ``auto`` estimates with. asked: as for `checkup`.
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

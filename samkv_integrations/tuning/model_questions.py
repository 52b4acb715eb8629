"""Questions that the model itself asks about chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tqdm.auto import tqdm

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.journal import Journal
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput

INSTRUCTION = (
    "Write one short question that the text above answers, in the language of the text. "
    "Write nothing but the question."
)
LABEL = "question"
_MOST_TOKENS = 48
_QUOTES = "\"'“”„«»「」*` "


def asked_by_model(
    engine: Engine,
    texts: Sequence[str],
    journal: Journal,
    *,
    seed: int,
    most: int,
    chat: bool,
) -> list[Question]:
    """A question about each of ``most`` chunks, greedily, by full prefill of the chunk alone.

    Chunks whose answer holds no question are left out. Questions that the journal holds are not
    asked for again.

    chat: whether the model takes instructions, through its chat template; else it continues a text.
    Raises EmptyInput if the model writes no question at all.
    """
    found: list[Question] = []
    order = random.Random(seed).sample(list(texts), min(most, len(texts)))
    for text in tqdm(order, desc="asking for questions", unit="chunk"):
        key = engine.key_of(text)
        if (key, LABEL) not in journal.rows:
            answer = engine.generate(
                prompt_for(text, chat=chat), [], method="recompute", max_new_tokens=_MOST_TOKENS
            )
            journal.add({"id": key, "label": LABEL, "question": question_in(answer.text)})
        if question := journal.rows[key, LABEL]["question"]:
            found.append(
                Question(
                    id=key, dataset="model", kind="model", question=question, answers=(),
                    documents=(),
                )
            )  # fmt: skip
    if not found:
        raise EmptyInput(
            f"{engine.model.name!r} wrote no question about {len(order)} chunks; give some with "
            "--questions FILE, or leave --asked-by out"
        )
    return found


def prompt_for(text: str, *, chat: bool) -> str | list[dict[str, str]]:
    """The prompt that asks for a question about a text."""
    if chat:
        return [{"role": "user", "content": f"{text}\n\n{INSTRUCTION}"}]
    return f"Text:\n{text}\n\nA question that the text answers:"


def question_in(answer: str) -> str:
    """The question that a model wrote: its first line, without quotes; empty for none."""
    lines = [line.strip(_QUOTES) for line in answer.splitlines() if line.strip(_QUOTES)]
    return lines[0] if lines else ""

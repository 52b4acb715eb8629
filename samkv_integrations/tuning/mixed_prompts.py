"""The prompts that a prefix is learned from: documents of the user, mixed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from samkv_integrations.cache.windows import MIN_RUN, MemoryIndex
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import find_runs
from samkv_integrations.tuning.distil import Prompt
from samkv_integrations.tuning.questions import from_chunks

LEAST_CHUNKS = 20
"""Chunks that prompts can be mixed of; fewer are learned by heart."""

FEWEST, MOST = 2, 8
"""Chunks of a prompt."""

Part = Literal["learn", "choose", "judge"]
"""Of the chunks or questions: the first three fifths are learned from, the next chooses among the
stages of learning, and the last judges the choice."""

_T = TypeVar("_T")
_SUMMARY = "Summarise what the documents say."
_PLAIN = 4  # every so manieth prompt does without the chat template, and as many ask for a summary


@dataclass(frozen=True, kw_only=True)
class Source:
    """What prompts are made of: chunks, or questions with theirs.

    cuts: all chunks in the order of their documents, once for each size that these were cut into.
    most_tokens: of a prompt.

    Raises EmptyInput if there is too little of both.
    """

    cuts: Sequence[Sequence[str]] = ()
    questions: Sequence[Question] = ()
    most_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.questions and any(len(one.documents) < FEWEST for one in self.questions):
            raise InvalidOption(
                f"a question has fewer than {FEWEST} documents; give each its 'documents', the "
                "texts of the chunks that it is asked over"
            )
        found = len(self.questions) or max(map(len, self.cuts), default=0)
        if found < LEAST_CHUNKS:
            raise EmptyInput(
                f"too few chunks or questions to learn from ({found}); give documents of at "
                f"least {LEAST_CHUNKS} chunks, or as many questions"
            )

    def prompt(self, model: Model, seed: str, part: Part) -> Prompt:
        """One prompt of a part, the same for the same seed."""
        order = random.Random(seed)
        n = order.randint(FEWEST, MOST)
        if self.questions:
            asked = order.choice(_of(self.questions, part))
            documents = list(asked.documents)[:n]
            question = asked.question
        else:
            documents = self._mixed(order, n, part)
            made = from_chunks(documents, seed=order.randrange(2**31))
            is_summary = not made or order.randrange(_PLAIN) == 0
            question = _SUMMARY if is_summary else made[0].question
        order.shuffle(documents)
        chat = model.has_chat_template and order.randrange(_PLAIN) > 0
        while True:
            asking = Question(question=question, documents=tuple(documents))
            ids = asking.prompt_ids(model, chat=chat)
            if len(ids) <= self.most_tokens or len(documents) == 1:
                break
            documents.pop()
        index = MemoryIndex(b"adapt")
        for body in documents:
            index.add(body, model.tokenize(body, special=False))
        return Prompt(ids=ids, chunks=find_runs(ids, [index]))

    def _mixed(self, order: random.Random, n: int, part: Part) -> list[str]:
        """Chunks of one size: some that follow each other in a document, and random ones."""
        chunks = _of(order.choice([cut for cut in self.cuts if len(cut) >= LEAST_CHUNKS]), part)
        n = min(n, len(chunks))
        place = order.randrange(len(chunks))
        together = chunks[place : place + (n + 1) // 2]
        return list(dict.fromkeys([*together, *order.sample(chunks, n)]))[:n]


def _of(items: Sequence[_T], part: Part) -> Sequence[_T]:
    fifth = len(items) // 5
    learned, chosen = len(items) - 2 * fifth, len(items) - fifth
    return {"learn": items[:learned], "choose": items[learned:chosen], "judge": items[chosen:]}[
        part
    ]


def usable(model: Model, texts: Sequence[str]) -> list[str]:
    """The texts that a prompt can take from a cache: those of `MIN_RUN` tokens or more, once."""
    return [
        text for text in dict.fromkeys(texts) if len(model.tokenize(text, special=False)) >= MIN_RUN
    ]

"""Questions with gold answers, and the judge of methods, which counts right answers.

A question counts for every method, whether or not full prefill answers it right: a method may lose
a right answer, or win one. Methods are compared pair by pair, on the same questions. Answers are
normalised as LongBench does: LongBench/metrics.py of THUDM/LongBench at 2e00731 (MIT).
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.ingest.documents import read_text
from samkv_integrations.prompt.quoting import RenderedPrompt
from samkv_integrations.prompt.rag_template import rag_prompt
from samkv_integrations.runtimes.base import Runtime

YES_NO = frozenset(("yes", "no"))
_RESAMPLES = 10_000
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the documents that the model is given.

    answers: the right answers; empty if they are not known.
    documents: texts of the chunks, in order; empty if chunks are to be retrieved.
    """

    question: str
    id: str = "1"
    answers: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    @property
    def has_gold(self) -> bool:
        """Whether answers can be judged. A gold answer needs a word that is not an article."""
        return any(f1_words(answer) for answer in self.answers)

    def prompt(self, *, chat: bool = False) -> str | list[dict[str, str]]:
        """The whole prompt. chat: as one user message, for a chat template."""
        return rag_prompt(self.question, self.documents, chat=chat)

    def prompt_ids(self, model: Runtime, *, chat: bool = False) -> list[int]:
        """Token ids of the prompt, as transformers tokenizes it."""
        prompt = self.prompt(chat=chat)
        rendered = RenderedPrompt(prompt) if isinstance(prompt, str) else model.render_chat(prompt)
        return model.tokenize_prompt(rendered)


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)

    question: Annotated[str, Field(pattern=r"\S")]  # not empty
    answers: list[str | int | float] = []
    documents: list[Annotated[str, Field(pattern=r"\S")]] = []


def read_questions(path: Path) -> list[Question]:
    """Read a JSON Lines file of objects with ``question``.

    Optional are ``answers``, a list of right answers, and ``documents``, a list of chunk texts.

    Raises:
        InvalidOption: the file is missing, or a line has another form.
        EmptyInput: the file has no question.
    """
    questions = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _Row.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            said = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise InvalidOption(
                f"{path}, line {number}: {said}; each line must be a JSON object with question "
                "and, if they are known, answers and documents"
            ) from error
        questions.append(
            Question(
                question=row.question, id=str(number), answers=tuple(map(str, row.answers)),
                documents=tuple(row.documents),
            )
        )  # fmt: skip
    if not questions:
        raise EmptyInput(f"{path} holds no question; give a JSON object with question in each line")
    return questions


# -- the judge ------------------------------------------------------------------------------------


def f1_words(text: str) -> list[str]:
    """Words as LongBench compares them: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def is_right(answer: str, gold: Sequence[str]) -> bool:
    """Whether an answer contains one of the gold answers, both normalised as SQuAD does.

    Normalised texts are in lower case, without punctuation and articles. If the gold answers are
    yes or no, only the first word of the answer counts.
    """
    words = f1_words(answer)
    for each in gold:
        wanted = f1_words(each)
        if not wanted:
            continue
        if len(wanted) == 1 and wanted[0] in YES_NO:
            if words[:1] == wanted:
                return True
        elif f" {' '.join(wanted)} " in f" {' '.join(words)} ":
            return True
    return False


def is_in_documents(gold: Sequence[str], documents: Sequence[str]) -> bool:
    """Whether a document contains a gold answer, which can be copied; yes and no also count."""
    text = "\n".join(documents)
    return any(set(f1_words(each)) <= YES_NO or is_right(text, [each]) for each in gold)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A method compared with full prefill, on the same questions.

    right, full: right answers of the method, and of full prefill. lost, won: questions that only
    full prefill answers right, and that only the method does. difference: the method's share of
    right answers less full prefill's, with its 95 % interval from low to high (bootstrap over
    questions, paired). p: McNemar's exact test, two-sided.
    """

    questions: int
    right: int
    full: int
    lost: int
    won: int
    difference: float
    low: float
    high: float
    p: float

    @classmethod
    def of(cls, mine: Sequence[bool], full: Sequence[bool]) -> Paired:
        """The comparison. mine, full: whether each question was answered right, in one order."""
        n = len(full)
        lost = sum(theirs and not own for own, theirs in zip(mine, full, strict=True))
        won = sum(own and not theirs for own, theirs in zip(mine, full, strict=True))
        # Resampling questions of three kinds is a draw from a multinomial distribution.
        shares = np.array([lost, won, n - lost - won]) / max(1, n)
        drawn = np.random.default_rng(0).multinomial(n, shares, _RESAMPLES)
        low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / max(1, n), (0.025, 0.975))
        changed = lost + won
        tail = sum(comb(changed, k) for k in range(min(lost, won) + 1)) / 2**changed
        return cls(
            questions=n, right=sum(mine), full=sum(full), lost=lost, won=won,
            difference=(won - lost) / max(1, n), low=float(low), high=float(high),
            p=min(1.0, 2 * tail),
        )  # fmt: skip

    @property
    def points(self) -> str:
        """The difference and its interval in percentage points."""
        return f"{100 * self.difference:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

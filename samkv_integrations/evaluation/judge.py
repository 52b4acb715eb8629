"""The judge of methods: how many answers are right, of all questions that were asked.

A question counts for every method, whether or not full prefill answers it: a method may lose a
right answer, or win one. Methods are compared pair by pair, on the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from samkv_integrations.evaluation.measures import f1_words

YES_NO = frozenset(("yes", "no"))
_RESAMPLES = 10_000


def is_right(answer: str, gold: Sequence[str]) -> bool:
    """Whether one of the gold answers stands in an answer, both normalised as SQuAD does.

    Normalised: lower case, without punctuation and articles. A question whose gold answers are yes
    or no is judged by the first word of the answer.
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
    """Whether a gold answer stands in a document, so that it can be copied; yes and no do."""
    text = "\n".join(documents)
    return any(set(f1_words(each)) <= YES_NO or is_right(text, [each]) for each in gold)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A method beside full prefill, on the same questions.

    right, full: right answers of both. lost, won: questions that only full prefill, and only the
    method, answers. difference: of the shares of right answers, with its 95 % interval from low to
    high (bootstrap over questions, paired). p: McNemar's exact test, two-sided.
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
        """From whether each question was answered right, by both in the same order."""
        n = len(full)
        lost = sum(theirs and not own for own, theirs in zip(mine, full, strict=True))
        won = sum(own and not theirs for own, theirs in zip(mine, full, strict=True))
        # Three kinds of questions: resampling them is a draw from a multinomial distribution.
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

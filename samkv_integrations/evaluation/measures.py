"""Scores of answers, and the distance between two next-token distributions.

English answers are scored as LongBench does: LongBench/metrics.py of THUDM/LongBench at 2e00731
(MIT). Values are shares, 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1_words(text: str) -> list[str]:
    """Words as LongBench compares them: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer has the `f1_words` of an expected one, else 0."""
    return float(any(f1_words(answer) == f1_words(each) for each in expected))


def f1_score(answer: str, expected: Sequence[str]) -> float:
    """The best F1 over the expected answers, whatever the order of words."""
    return max(_f1(f1_words(answer), f1_words(each)) for each in expected)


def _f1(mine: Sequence[str], theirs: Sequence[str]) -> float:
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def kl(full: Tensor, other: Tensor) -> Tensor:
    """(n,) KL(full || other) in nats. Both arguments are logits (n, vocabulary)."""
    theirs, mine = (logits.double().log_softmax(-1) for logits in (full, other))
    share = theirs.exp()
    # 0 where full prefill's probability is 0, also if the other's is: 0 * inf is no number
    terms = torch.where(share > 0, share * (theirs - mine), 0.0)
    return terms.sum(-1).clamp_min(0)  # rounding may make it slightly negative

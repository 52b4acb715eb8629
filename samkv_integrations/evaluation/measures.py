"""Scores of answers, distances between next-token distributions, and intervals of both.

English answers are scored as LongBench does: LongBench/metrics.py of THUDM/LongBench at 2e00731
(MIT). Values are shares, 0 to 1.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Z95 = 1.959964

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1_words(text: str) -> list[str]:
    """Words as LongBench compares them: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def f1(mine: Sequence[Hashable], theirs: Sequence[Hashable]) -> float:
    """F1 over words or tokens, their order ignored; 0 for empty ones."""
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer equals one of the expected ones but for what F1 ignores, else 0."""
    return float(any(f1_words(answer) == f1_words(each) for each in expected))


def f1_score(answer: str, expected: Sequence[str]) -> float:
    """The best F1 over the expected answers."""
    return max(f1(f1_words(answer), f1_words(each)) for each in expected)


def kl(full: Tensor, other: Tensor) -> Tensor:
    """(n,) KL(full || other) in nats, of logits (n, vocabulary) each."""
    theirs, mine = (logits.double().log_softmax(-1) for logits in (full, other))
    share = theirs.exp()
    # a token of probability 0 under full prefill weighs nothing, whatever the other says of it
    terms = torch.where(share > 0, share * (theirs - mine), 0.0)
    return terms.sum(-1).clamp_min(0)  # rounding may leave a little less than 0


def same_top1(full: Tensor, other: Tensor) -> Tensor:
    """(n,) float64, 1 where the likeliest token is the same, of logits (n, vocabulary) each."""
    return (full.argmax(-1) == other.argmax(-1)).double()


def log_likelihood(logits: Tensor, tokens: Sequence[int]) -> float:
    """Mean over ``tokens`` of their log-probabilities, of logits (n, vocabulary) before them."""
    rows = logits.double().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(tokens)[:, None]).mean())


def wilson(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share that was seen among ``n``; (0, 1) of none.

    Where all of 20 questions agree, a bootstrap resamples nothing but agreement and says [1, 1];
    this says [.84, 1].
    """
    if not n:
        return 0.0, 1.0
    squared = z * z / n
    middle = (share + squared / 2) / (1 + squared)
    half = z / (1 + squared) * math.sqrt(share * (1 - share) / n + squared / (4 * n))
    # it holds the share, also where rounding says otherwise
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean: 2,000 resamples, fixed seed."""
    if len(set(values)) < 2:  # nothing to resample
        return values[0], values[0]
    return _middle_95(np.asarray(values)[_resamples(len(values))].mean(axis=-1))


def ratio_interval(
    values: Sequence[float],
    bases: Sequence[float],
    middle: Callable[..., Any] = np.mean,
) -> tuple[float, float] | None:
    """95 % bootstrap interval of the ratio of two means, or of another ``middle``.

    The two figures of a question are drawn together: what makes a question hard for both cancels.
    None if a base is 0, because a resample may hold nothing else.
    """
    if not all(bases):
        return None
    ratios = {value / base for value, base in zip(values, bases, strict=True)}
    if len(ratios) < 2:  # nothing to resample
        return (only := ratios.pop()), only
    drawn = _resamples(len(values))
    resampled = (middle(np.asarray(each)[drawn], axis=-1) for each in (values, bases))
    return _middle_95(next(resampled) / next(resampled))


def _resamples(n: int) -> Any:  # noqa: ANN401
    """(2000, n) places that are drawn with replacement."""
    return np.random.default_rng(0).integers(0, n, (2_000, n))


def _middle_95(figures: Any) -> tuple[float, float]:  # noqa: ANN401
    low, high = np.quantile(figures, (0.025, 0.975))
    return float(low), float(high)

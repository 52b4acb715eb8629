"""How far distributions are from each other, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks import divergence
from samkv_integrations.evaluation import measures


def logits(*shares: list[float]) -> Tensor:
    """Of these distributions, each row shifted by another constant."""
    shifts = torch.arange(len(shares))[:, None]
    return torch.tensor(shares).log() + shifts


def slow_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_kl_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    assert slow_kl(p, q) == pytest.approx(0.25 * math.log(2))
    assert measures.kl(logits(p, p, q), logits(p, q, p)).tolist() == pytest.approx(
        [0, slow_kl(p, q), slow_kl(q, p)], abs=1e-7
    )


def test_kl_against_loops() -> None:
    torch.manual_seed(0)
    full, other = torch.randn(2, 4, 50).unbind(0)
    expected = [
        slow_kl(p, q)
        for p, q in zip(full.softmax(-1).tolist(), other.softmax(-1).tolist(), strict=True)
    ]
    assert measures.kl(full, other).tolist() == pytest.approx(expected, rel=1e-5)


def test_kl_looks_from_full_prefill() -> None:
    """What it rules out weighs nothing; what the other rules out weighs infinitely."""
    sure, torn = logits([1.0, 0.0]), logits([0.5, 0.5])
    assert measures.kl(sure, torn).item() == pytest.approx(math.log(2))
    assert measures.kl(torn, sure).item() == math.inf
    assert measures.kl(sure, sure).item() == 0


def test_kl_of_equal_logits_is_nothing() -> None:
    torch.manual_seed(1)
    rows = 30 * torch.randn(8, 1000)
    assert measures.kl(rows, rows).tolist() == [0] * 8
    assert 0 <= float(measures.kl(rows, rows + 100).min())
    assert float(measures.kl(rows, rows + 100).max()) < 1e-4  # the sum is rounded in float32


def test_the_likeliest_token_is_compared() -> None:
    full = logits([0.6, 0.4], [0.6, 0.4], [0.1, 0.9])
    other = logits([0.9, 0.1], [0.4, 0.6], [0.3, 0.7])
    assert measures.same_top1(full, other).tolist() == [1, 0, 1]


def test_log_likelihood_is_a_mean_a_token() -> None:
    rows = logits([0.5, 0.5], [0.75, 0.25])
    assert measures.log_likelihood(rows, [0, 1]) == pytest.approx(
        (math.log(0.5) + math.log(0.25)) / 2
    )


def test_a_question_measured_by_hand() -> None:
    p, q, r = [0.75, 0.25], [0.5, 0.5], [0.25, 0.75]
    full = divergence.Forced(own=logits(p, p), reference=logits(q), expected=(0,))
    other = divergence.Forced(own=logits(q, r), reference=logits(r), expected=(0,))
    first, second = slow_kl(p, q), slow_kl(p, r)
    assert divergence.measure(full, other) == pytest.approx(
        {
            "first_kl": first,
            "first_top1": 1,  # of equal ones the first counts
            "kl": (first + second) / 2,
            "top1": 0.5,
            "answer_llr": math.log(0.25 / 0.5),
        }
    )
    itself = divergence.measure(full, full)
    assert itself == {"first_kl": 0, "first_top1": 1, "kl": 0, "top1": 1, "answer_llr": 0}

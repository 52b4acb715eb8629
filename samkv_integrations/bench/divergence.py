"""How far next-token distributions are from full prefill's: the figures of one question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MEASURES = ("first_kl", "first_top1", "kl", "top1", "answer_llr")
DIVERGENCES = ("first_kl", "kl")
OF_REFERENCE = "answer_llr"
"""The one of `MEASURES` that takes an expected answer."""


def kl(full: Tensor, other: Tensor) -> Tensor:
    """(n,) KL(full || other) in nats, of logits (n, vocabulary) each."""
    theirs, mine = (logits.double().log_softmax(-1) for logits in (full, other))
    share = theirs.exp()
    # a token that full prefill rules out weighs nothing, whatever the other says of it
    terms = torch.where(share > 0, share * (theirs - mine), 0.0)
    return terms.sum(-1).clamp_min(0)  # what rounding leaves of equal ones may be below


def same_top1(full: Tensor, other: Tensor) -> Tensor:
    """(n,) float64, 1 where the likeliest token is the same, of logits (n, vocabulary) each."""
    return (full.argmax(-1) == other.argmax(-1)).double()


def log_likelihood(logits: Tensor, tokens: Sequence[int]) -> float:
    """Mean over ``tokens`` of their log-probabilities, of logits (n, vocabulary) before them."""
    rows = logits.double().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(tokens)[:, None]).mean())


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Logits of one question, after the same tokens whatever computes them.

    own: (n, vocabulary) along the answer that full prefill gives. reference: (m, vocabulary) along
    the expected answer, whose token ids are ``expected``, (m,); None where none is known.
    """

    own: Tensor
    reference: Tensor | None = None
    expected: tuple[int, ...] = ()


def measure(full: Forced, other: Forced) -> dict[str, float | None]:
    """The `MEASURES` of one question, `OF_REFERENCE` None without an expected answer.

    first_kl, first_top1: of the first token. kl, top1: means over the tokens of full prefill's
    answer, the first one included. answer_llr: how much likelier the expected answer has become,
    as the log-likelihood ratio a token.
    """
    divergences, same = kl(full.own, other.own), same_top1(full.own, other.own)
    llr = None
    if full.reference is not None and other.reference is not None:
        before = log_likelihood(full.reference, full.expected)
        llr = log_likelihood(other.reference, other.expected) - before
    return {
        "first_kl": float(divergences[0]),
        "first_top1": float(same[0]),
        "kl": float(divergences.mean()),
        "top1": float(same.mean()),
        OF_REFERENCE: llr,
    }

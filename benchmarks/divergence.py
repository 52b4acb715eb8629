"""How far next-token distributions are from full prefill's: the figures of one question."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samkv_integrations.evaluation.measures import kl, log_likelihood, same_top1

MEASURES = ("first_kl", "first_top1", "kl", "top1", "answer_llr")
DIVERGENCES = ("first_kl", "kl")
OF_REFERENCE = "answer_llr"
"""The one of `MEASURES` that takes an expected answer."""


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

"""How far next-token distributions are from full prefill's: figures of a question, and of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samkv_integrations.bench.quality import ALL, Row, interval
from samkv_integrations.errors import MissingExtra

REUSE = "reuse"
"""Label of chunk caches as they are, which other labels' figures are divided by."""

MEASURES = ("first_kl", "first_top1", "kl", "top1", "answer_llr")
_DIVERGENCES = ("first_kl", "kl")
_SHARED = (*_DIVERGENCES, "first_top1", "top1")


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
    """Mean over ``tokens`` of their log-probabilities, of logits (n, vocabulary), one row each."""
    rows = logits.double().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(tokens)[:, None]).mean())


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Logits of one question, after the same tokens whatever computes them.

    own: (n, vocabulary) along the answer that full prefill gives. reference: (m, vocabulary) along
    the expected answer, whose token ids are ``expected``, (m,).
    """

    own: Tensor
    reference: Tensor
    expected: tuple[int, ...]


def measure(full: Forced, other: Forced) -> dict[str, float]:
    """The `MEASURES` of one question.

    first_kl, first_top1: of the first token. kl, top1: means over the tokens of full prefill's
    answer, the first one included. answer_llr: how much likelier the expected answer has become,
    as the log-likelihood ratio a token.
    """
    divergences, same = kl(full.own, other.own), same_top1(full.own, other.own)
    before, after = (log_likelihood(f.reference, f.expected) for f in (full, other))
    return {
        "first_kl": float(divergences[0]),
        "first_top1": float(same[0]),
        "kl": float(divergences.mean()),
        "top1": float(same.mean()),
        "answer_llr": after - before,
    }


def ratio_interval(values: Sequence[float], bases: Sequence[float]) -> tuple[float, float] | None:
    """95 % bootstrap interval of the ratio of two means, over questions that they share.

    A question's two figures are drawn together (2,000 resamples, fixed seed): what makes a question
    hard for both cancels. None where a base is 0 and a resample may hold nothing else.
    """
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtra.of("scipy", "bench") from error
    if not all(bases):
        return None
    ratios = {value / base for value, base in zip(values, bases, strict=True)}
    if len(ratios) < 2:  # nothing to resample
        return (only := ratios.pop()), only
    found = bootstrap(
        (values, bases), lambda v, b, axis: np.mean(v, axis=axis) / np.mean(b, axis=axis),
        paired=True, n_resamples=2_000, vectorized=True, method="percentile", rng=0,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row for each (label, kind), and for each label over all kinds, which is `ALL`.

    Figures are means over questions with 95 % bootstrap intervals, those of KL also medians. With
    `REUSE` among the labels, each figure but ``answer_llr`` also as a multiple of its
    (``kl_of_reuse``), those of KL with intervals; None where that is 0. All labels must have the
    same questions, in the same order.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        for kind in (ALL, row["kind"]):
            groups.setdefault((kind, row["label"]), []).append(row)
    kinds = list(dict.fromkeys([ALL, *(kind for kind, _ in groups)]))
    order = sorted(groups, key=lambda name: kinds.index(name[0]))
    return [_summary(*name, groups[name], groups.get((name[0], REUSE))) for name in order]


def _summary(
    kind: str,
    label: str,
    group: Sequence[Mapping[str, Any]],
    reuse: Sequence[Mapping[str, Any]] | None,
) -> Row:
    line: Row = {"label": label, "kind": kind, "questions": len(group)}
    for key in ("method", "eviction"):
        line[key] = group[0][key]
    line["tokens"] = fmean(row["tokens"] for row in group)
    for name in MEASURES:
        values = [row[name] for row in group]
        line[name] = fmean(values)
        line[f"{name}_low"], line[f"{name}_high"] = interval(values)
        if name in _DIVERGENCES:
            line[f"{name}_median"] = median(values)
    for name in _SHARED if reuse else ():
        values, bases = ([row[name] for row in rows] for rows in (group, reuse or ()))
        base, ratio = fmean(bases), f"{name}_of_reuse"
        line[ratio] = line[name] / base if base else None
        if name in _DIVERGENCES:
            low, high = ratio_interval(values, bases) or (None, None)
            line[f"{ratio}_low"], line[f"{ratio}_high"] = low, high
    return line

"""Where a candidate stands after the questions that it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, Literal

from samkv_integrations.bench import intervals
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import Row
from samkv_integrations.tuning.shares import wilson

By = Literal["exact", "f1"]
"""What counts as agreement: the same answer, or the tokens that both have."""

NOISE = 1.1
"""Times within this factor are taken for equal: medians of pairs differ so much from run to run."""

WORTH = 0.95
"""First token of full prefill's that a setting must stay below to be worth its approximation."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A candidate over the questions that it was asked; means, but for the time.

    agreement: share of questions with full prefill's answer, or mean F1 with it; low, high: its
        95 % interval. f1, first_kl, first_top1: distances from full prefill.
    loglik_gap: how much less likely its answer is than full prefill's own, a token, under full
        prefill. ttft_ratio: median of first token over full prefill's.
    bytes_read, kv_ratio: bytes of caches, and the working cache as a share of full prefill's.
    whole: share of questions on which it chose to compute everything.
    """

    label: str
    n: int
    agreement: float
    low: float
    high: float
    f1: float
    first_kl: float
    first_top1: float
    loglik_gap: float
    ttft_ratio: float
    bytes_read: float
    kv_ratio: float
    whole: float

    def is_enough(self, target: float) -> bool:
        """Whether it agrees as often as is asked for, and sooner than full prefill."""
        return self.agreement >= target and self.ttft_ratio < WORTH

    def to_row(self) -> dict[str, Any]:
        """The figures as JSON-able values."""
        return asdict(self)


def standing_of(label: str, rows: Sequence[Row], by: By = "exact") -> Standing:
    """The standing of a candidate. rows: its own, one a question, at least one."""
    agreement = mean(row[by] for row in rows)
    low, high = wilson(agreement, len(rows))
    return Standing(
        label=label,
        n=len(rows),
        agreement=agreement,
        low=low,
        high=high,
        f1=mean(row["f1"] for row in rows),
        first_kl=mean(row["first_kl"] for row in rows),
        first_top1=mean(row["first_top1"] for row in rows),
        loglik_gap=mean(row["full_answer_loglik"] - row["answer_loglik"] for row in rows),
        ttft_ratio=median(row["ttft_s"] / row["full_ttft_s"] for row in rows),
        bytes_read=mean(row["bytes_read"] for row in rows),
        kv_ratio=mean(row["kv_bytes"] / row["full_kv_bytes"] for row in rows),
        whole=mean(float(row["ran"] in ("recompute", "prefix")) for row in rows),
    )


def bootstrap(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """95 % bootstrap intervals of F1 and first-token KL. Raises MissingExtra without scipy."""
    return {
        f"{name}_interval": intervals.interval([row[name] for row in rows])
        for name in ("f1", "first_kl")
    }


def cheapest_first(standings: Sequence[Standing]) -> list[Standing]:
    """In order of first token; what agrees most comes first of those that are equal within noise.

    Then what is nearest to full prefill at the first token, then what holds least.
    """
    left, ordered = list(standings), []
    while left:
        bound = min(each.ttft_ratio for each in left) * NOISE
        near = [each for each in left if each.ttft_ratio <= bound]
        best = min(near, key=lambda each: (-each.agreement, each.first_kl, each.kv_ratio))
        ordered.append(best)
        left.remove(best)
    return ordered


def best_first(standings: Sequence[Standing], target: float) -> list[Standing]:
    """Those at the target, the cheapest at the head; then those below it, the nearest at the head.

    What is below it on few questions may be at it on many.
    """
    ordered = cheapest_first(standings)
    return sorted(ordered, key=lambda each: max(0.0, target - each.agreement))


def check_target(agree: float, by: str) -> None:
    """Raises InvalidOption for what can be no target."""
    if not 0 < agree <= 1:
        raise InvalidOption(f"agree={agree:g}; it must be above 0 and at most 1, as in 0.95")
    if by not in ("exact", "f1"):
        raise InvalidOption(f"by={by!r}; allowed: exact, f1")

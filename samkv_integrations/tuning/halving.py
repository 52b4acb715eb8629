"""Successive halving: many candidates on few questions, few candidates on many.

Time is counted, not looked at: asking says what it took, and a run that is taken up again counts
what it took before. So the same rows lead to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from samkv_integrations.tuning.standing import NOISE, WORTH, Standing, best_first

FIRST = 8
"""Questions of the first round; each round doubles them."""

Ask = Callable[[str, Sequence[str]], float]
"""Ask a question, by its id, of some candidates; returns the seconds that it took."""


@dataclass(kw_only=True)
class Budget:
    """Seconds that asking may take, and took.

    Asking ends before they are over, as far as one can tell from what came before.
    """

    seconds: float
    spent: float = 0.0
    _most: float = 0.0  # that one answer took, of full prefill or of a candidate, on the average

    def allows(self, n_answers: int) -> bool:
        """Whether so many answers to one question will probably fit."""
        return self.spent + self._most * n_answers <= self.seconds and self.spent < self.seconds

    def take(self, seconds: float, n_answers: int) -> None:
        """Count what so many answers took."""
        self.spent += seconds
        self._most = max(self._most, seconds / n_answers)


@dataclass(kw_only=True)
class Race:
    """How a race ended.

    standings: of all candidates that were asked anything, by label. dropped: cannot reach the
    target or are slower than full prefill, in order of their going. shelved: might be enough, but
    others came first. left: still in it.
    """

    standings: dict[str, Standing] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    shelved: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    is_out_of_time: bool = False

    def include(self, other: Race) -> None:
        """Add what a race among other candidates found."""
        self.standings |= other.standings
        self.dropped += other.dropped
        self.shelved += other.shelved
        self.left += other.left
        self.is_out_of_time = self.is_out_of_time or other.is_out_of_time

    def state_of(self, label: str) -> str:
        """``out``, ``shelved``, or ``in`` for what is left."""
        if label in self.dropped:
            return "out"
        return "shelved" if label in self.shelved else "in"


def race(
    labels: Sequence[str],
    questions: Sequence[str],
    ask: Ask,
    standing: Callable[[str], Standing],
    *,
    target: float,
    budget: Budget,
) -> Race:
    """Find the candidates that reach ``target``, cheapest ones first.

    After each round: what cannot reach the target any more is dropped, by the upper bound of its
    interval, and what is slower than full prefill by more than noise; then half of the others are
    shelved: the dearer ones of those at the target, and what is farthest below it. The candidate
    nearest to full prefill stays whatever it costs. If none is left, or none is enough when the
    questions are over, the shelved ones are taken up again.

    It ends when one is left that is enough, when the cheapest of these is above the target by the
    lower bound of its interval, and when the questions or the time are over.

    labels: cheapest first, as far as one can say before. standing: of a label, from what it was
    asked.
    """
    found = Race(left=list(labels))
    n = min(FIRST, len(questions))
    asked: dict[str, set[str]] = {label: set() for label in labels}
    while found.left:
        _round(found, questions[:n], ask, asked, budget)
        _look(found, standing, asked)
        if found.is_out_of_time:
            break
        _drop(found, target)
        ordered = best_first([found.standings[label] for label in found.left], target)
        is_met = any(each.is_enough(target) for each in ordered)
        if found.shelved and (not ordered or (n >= len(questions) and not is_met)):
            found.left, found.shelved = [*found.left, *found.shelved], []
            continue
        is_settled = is_met and (len(ordered) == 1 or ordered[0].low >= target)
        if n >= len(questions) or is_settled or not ordered:
            break
        _shelve(found, ordered)
        n = min(2 * n, len(questions))
    return found


def _round(
    found: Race, questions: Sequence[str], ask: Ask, asked: dict[str, set[str]], budget: Budget
) -> None:
    """Ask what the candidates that are left were not asked yet."""
    for question in questions:
        labels = [label for label in found.left if question not in asked[label]]
        if not labels:
            continue
        if not budget.allows(1 + len(labels)):
            found.is_out_of_time = True
            return
        budget.take(ask(question, labels), 1 + len(labels))
        for label in labels:
            asked[label].add(question)


def _look(found: Race, standing: Callable[[str], Standing], asked: dict[str, set[str]]) -> None:
    found.standings |= {label: standing(label) for label in found.left if asked[label]}


def _drop(found: Race, target: float) -> None:
    for label in list(found.left):
        standing = found.standings[label]
        if standing.high < target or standing.ttft_ratio > WORTH * NOISE:
            found.left.remove(label)
            found.dropped.append(label)


def _shelve(found: Race, ordered: Sequence[Standing]) -> None:
    """Shelve the worse half, but for what is nearest to full prefill; ordered: by `best_first`."""
    nearest = min(ordered, key=lambda each: (-each.agreement, each.first_kl))
    kept = {each.label for each in ordered[: (len(ordered) + 1) // 2]} | {nearest.label}
    found.shelved += [label for label in found.left if label not in kept]
    found.left = [label for label in found.left if label in kept]

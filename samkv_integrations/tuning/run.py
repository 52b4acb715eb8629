"""A run of tuning: the race, then what it chose on questions that took no part in the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm.auto import tqdm

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.journal import Journal
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.figures import Row
from samkv_integrations.tuning.candidates import FULL, Candidate
from samkv_integrations.tuning.halving import Budget, Race, race
from samkv_integrations.tuning.standing import (
    By,
    Standing,
    best_first,
    bootstrap,
    check_target,
    standing_of,
)

CHOICE_SHARE = 0.6
"""Of the time, and of the questions, that the race may take; the rest is for the check."""

LEAST_CHECKED = 16
"""Held-out questions without which nothing is recommended."""

NARROW = 0.1
"""Width of the check's interval that is enough."""

WORTH = 0.95
"""First token of full prefill's that a setting must stay below to be worth its approximation."""


class Measures(Protocol):
    """What answers questions; a `Measurer`."""

    def rows(self, question: Question, labels: Sequence[str]) -> Iterable[Row]:
        """A row for full prefill and one for each of ``labels``."""
        ...


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is asked of a run. Raises InvalidOption for what cannot be.

    agree: least agreement with full prefill, by ``by``. minutes: that measuring may take, what an
    earlier part of the run took included.
    """

    agree: float = 0.95
    by: By = "exact"
    minutes: float = 10.0

    def __post_init__(self) -> None:
        check_target(self.agree, self.by)
        if not self.minutes > 0:
            raise InvalidOption(f"minutes={self.minutes:g}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A candidate on held-out questions, and whether it is at the target there."""

    standing: Standing
    is_enough: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found.

    chosen: the candidate that is recommended, None for full prefill; why: in words, then.
    checked: candidates on held-out questions, in the order in which they were tried.
    intervals: 95 % bootstrap intervals of each candidate's F1 and KL of the first token.
    n_checked: held-out questions, at most.
    seconds: that measuring took, in all parts of the run.
    """

    race: Race
    checked: Sequence[Checked]
    chosen: str | None
    why: str
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]
    n_checked: int
    seconds: float

    @property
    def interval_of(self) -> Standing | None:
        """The held-out figures of what is recommended."""
        return self.checked[-1].standing if self.chosen else None


def _bar(desc: str, minutes: float) -> tqdm[Any]:
    """A bar of seconds, which are those of the rows and not of the clock."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    return tqdm(total=60 * minutes, desc=desc, bar_format=form)


def split(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Questions to choose by, and held-out ones: of every five the last two."""
    choice = [q for place, q in enumerate(questions) if place % 5 < 3]
    return choice, [q for place, q in enumerate(questions) if place % 5 >= 3]


class Run:
    """One run over questions, which have their documents.

    Rows that the journal holds are not measured again, and count the seconds that they took then.
    """

    def __init__(
        self,
        config: TuneConfig,
        candidates: Sequence[Candidate],
        questions: Sequence[Question],
        measurer: Measures,
        journal: Journal,
    ) -> None:
        if len(questions) < 2:
            raise EmptyInput(
                f"{len(questions)} questions are too few; give more with --questions, or ingest "
                "more documents"
            )
        self._config, self._measurer, self._journal = config, measurer, journal
        self._candidates = {candidate.label: candidate for candidate in candidates}
        self._choice, self._held_out = split(questions)
        self._by_id = {question.id: question for question in questions}
        self._asked: dict[str, list[Row]] = {}

    def run(self) -> Result:
        """Race, check, recommend. Progress goes to standard error."""
        config = self._config
        budget = Budget(seconds=60 * config.minutes * CHOICE_SHARE)
        with _bar("tuning", config.minutes) as bar:
            ask = self._asker(bar)
            self._asked = {}
            found = race(
                [each.label for each in self._candidates.values() if each.in_store],
                [q.id for q in self._choice], ask, self._standing,
                target=config.agree, budget=budget,
                later=[each.label for each in self._candidates.values() if not each.in_store],
            )  # fmt: skip
            intervals = {label: bootstrap(self._asked[label]) for label in found.standings}
            budget.seconds = 60 * config.minutes
            checked = self._check(found, ask, budget)
        chosen = checked[-1].standing.label if checked and checked[-1].is_enough else None
        return Result(
            race=found,
            checked=checked,
            chosen=chosen,
            why="" if chosen else _why(found, checked, config),
            intervals=intervals,
            n_checked=max((each.standing.n for each in checked), default=0),
            seconds=budget.spent,
        )

    def measure_all(self, label: str) -> Standing | None:
        """One candidate on all questions, as far as the time allows; None if for none."""
        budget = Budget(seconds=60 * self._config.minutes)
        self._asked = {}
        with _bar("checking", self._config.minutes) as bar:
            ask = self._asker(bar)
            for question in self._by_id:
                if not budget.allows(2):
                    break
                budget.take(ask(question, [label]), 2)
        return self._standing(label) if label in self._asked else None

    def _standing(self, label: str) -> Standing:
        return standing_of(label, self._asked[label], self._config.by)

    def _asker(self, bar: tqdm[Any]) -> Callable[[str, Sequence[str]], float]:
        def ask(question: str, labels: Sequence[str]) -> float:
            rows = self._rows(question, labels)
            for label in labels:
                self._asked.setdefault(label, []).append(rows[label])
            seconds: float = sum(row["spent_s"] for row in rows.values())
            bar.set_postfix_str(f"{len(labels)} settings", refresh=False)
            bar.update(min(seconds, max(0.0, bar.total - bar.n)))
            return seconds

        return ask

    def _rows(self, question: str, labels: Sequence[str]) -> Mapping[str, Row]:
        """Full prefill's row and those of the labels, from the journal or measured now."""
        held = self._journal.rows
        missing = [label for label in labels if (question, label) not in held]
        if missing:
            for row in self._measurer.rows(self._by_id[question], missing):
                if (question, row["label"]) not in held:  # full prefill's first one stays
                    self._journal.add(row)
        return {label: held[question, label] for label in (FULL, *labels)}

    def _check(
        self, found: Race, ask: Callable[[str, Sequence[str]], float], budget: Budget
    ) -> list[Checked]:
        """Held-out questions for what the race chose; if it fails, for the next one."""
        checked: list[Checked] = []
        able = [s for label, s in found.standings.items() if label not in found.dropped]
        able = [s for s in able if s.ttft_ratio < WORTH]
        for each in best_first(able, self._config.agree):
            rows = self._asked.pop(each.label)
            standing = self._held_out_standing(each.label, ask, budget)
            self._asked[each.label] = rows
            if standing is None:
                break
            is_enough = (
                standing.n >= min(LEAST_CHECKED, len(self._held_out))
                and standing.agreement >= self._config.agree
                and standing.ttft_ratio < WORTH
            )
            checked.append(Checked(standing=standing, is_enough=is_enough))
            if is_enough:
                break
        return checked

    def _held_out_standing(
        self, label: str, ask: Callable[[str, Sequence[str]], float], budget: Budget
    ) -> Standing | None:
        """Until its interval is narrow, or lies below the target; None if there was no time."""
        standing = None
        for question in self._held_out:
            if not budget.allows(2):
                break
            budget.take(ask(question.id, [label]), 2)
            standing = self._standing(label)
            if standing.n >= LEAST_CHECKED and (
                standing.high - standing.low <= NARROW or standing.high < self._config.agree
            ):
                break
        return standing


def _why(found: Race, checked: Sequence[Checked], config: TuneConfig) -> str:
    """Why nothing is recommended but full prefill."""
    target = f"{100 * config.agree:g} % agreement"
    if not found.standings:
        return "nothing was measured: give more minutes"
    if any(each.standing.n < LEAST_CHECKED for each in checked) or (
        found.is_out_of_time and not checked
    ):
        return f"the time was over before a setting could be shown to reach {target}"
    if checked:
        return f"what came nearest does not reach {target} on held-out questions"
    if all(each.ttft_ratio >= WORTH for each in found.standings.values()):
        return "no setting is faster than full prefill here"
    return f"no setting reaches {target}"

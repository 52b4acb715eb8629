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
    WORTH,
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
"""Held-out questions without which nothing is recommended, where there are so many."""

NARROW = 0.1
"""Width of the check's interval that is enough."""

MOST_TRIED = 3
"""Candidates of a race that are tried on held-out questions: of many, one would pass by luck."""

LEAST_QUESTIONS = 5
"""Of which three are for the choice and two are held out."""


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

    race: among the candidates on the collection's own caches, and among the others if it came to
        that. chosen: the candidate that is recommended, None for full prefill; why: in words, then.
    checked: candidates on held-out questions, in the order in which they were tried.
    intervals: 95 % bootstrap intervals of each candidate's F1 and KL of the first token.
    seconds: that measuring took, in all parts of the run.
    """

    race: Race
    checked: Sequence[Checked]
    chosen: str | None
    why: str
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]
    seconds: float

    @property
    def chosen_standing(self) -> Standing | None:
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
        self._config, self._measurer, self._journal = config, measurer, journal
        self._candidates = {candidate.label: candidate for candidate in candidates}
        self._choice, self._held_out = split(questions)
        self._by_id = {question.id: question for question in questions}
        self._asked: dict[str, list[Row]] = {}

    def run(self) -> Result:
        """Race, check, recommend; with caches of other bits if none of the own ones is enough.

        Progress goes to standard error. Raises EmptyInput for fewer than LEAST_QUESTIONS questions.
        """
        if len(self._by_id) < LEAST_QUESTIONS:
            raise EmptyInput(
                f"{len(self._by_id)} questions are too few to choose by some and check by others; "
                f"give at least {LEAST_QUESTIONS} with --questions, or ingest more documents"
            )
        seconds = 60 * self._config.minutes
        budget, found, checked = Budget(seconds=seconds), Race(), list[Checked]()
        self._asked = {}
        with _bar("tuning", self._config.minutes) as bar:
            ask = self._asker(bar)
            for in_store in (True, False):
                budget.seconds = budget.spent + CHOICE_SHARE * (seconds - budget.spent)
                raced = race(
                    [one.label for one in self._candidates.values() if one.in_store == in_store],
                    [question.id for question in self._choice],
                    ask, self._standing, target=self._config.agree, budget=budget,
                )  # fmt: skip
                found.include(raced)
                budget.seconds = seconds
                checked += self._check(raced, ask, budget)
                if checked and checked[-1].is_enough:
                    break
        chosen = checked[-1].standing.label if checked and checked[-1].is_enough else None
        return Result(
            race=found,
            checked=checked,
            chosen=chosen,
            why="" if chosen else self._why(found, checked),
            intervals={label: bootstrap(self._asked[label]) for label in found.standings},
            seconds=budget.spent,
        )

    def measure_all(self, label: str) -> Standing:
        """One candidate on all questions, as far as the time allows; on one in any case."""
        budget = Budget(seconds=60 * self._config.minutes)
        self._asked = {}
        with _bar("checking", self._config.minutes) as bar:
            ask = self._asker(bar)
            for question in self._by_id:
                if not budget.allows(2):
                    break
                budget.take(ask(question, [label]), 2)
        return self._standing(label)

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
        for each in best_first(able, self._config.agree)[:MOST_TRIED]:
            rows = self._asked.pop(each.label)
            standing = self._held_out_standing(each.label, ask, budget)
            self._asked[each.label] = rows
            if standing is None:
                break
            is_enough = standing.n >= self._least and standing.is_enough(self._config.agree)
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
            if standing.n >= self._least and (
                standing.high - standing.low <= NARROW or standing.high < self._config.agree
            ):
                break
        return standing

    @property
    def _least(self) -> int:
        """Held-out questions without which nothing is recommended."""
        return min(LEAST_CHECKED, len(self._held_out))

    def _why(self, found: Race, checked: Sequence[Checked]) -> str:
        """Why nothing is recommended but full prefill."""
        target = f"{100 * self._config.agree:g} % agreement"
        if any(each.standing.n < self._least for each in checked) or (
            found.is_out_of_time and not checked
        ):
            return f"the time was over before a setting could be shown to reach {target}"
        if any(each.standing.agreement >= self._config.agree for each in checked):
            return f"what reaches {target} on held-out questions is not faster than full prefill"
        if checked:
            return f"what came nearest does not reach {target} on held-out questions"
        standings = found.standings.values()
        if all(each.ttft_ratio >= WORTH for each in standings):
            return "no setting is faster than full prefill here"
        faster = "" if all(each.agreement < self._config.agree for each in standings) else " faster"
        return f"no{faster} setting reaches {target}"

"""The race: what may be dropped, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from samkv_integrations.tuning.halving import FIRST, Budget, Race, race
from samkv_integrations.tuning.shares import wilson
from samkv_integrations.tuning.standing import Standing, cheapest_first

QUESTIONS = [f"q{n}" for n in range(120)]


def standing(label: str, agreement: float, n: int, *, cost: float, kl: float = 0.1) -> Standing:
    low, high = wilson(agreement, n)
    return Standing(
        label=label, n=n, agreement=agreement, low=low, high=high, f1=agreement, first_kl=kl,
        first_top1=1.0, loglik_gap=0.0, ttft_ratio=cost, bytes_read=1.0, kv_ratio=1.0, whole=0.0,
    )  # fmt: skip


class Field:
    """Candidates whose answers are known before: agreeing[label][n] is that of question n."""

    def __init__(
        self, agreeing: dict[str, Sequence[bool]], cost: dict[str, float] | None = None
    ) -> None:
        self.agreeing, self.cost = agreeing, cost or {}
        self.asked: dict[str, list[str]] = {label: [] for label in agreeing}

    def ask(self, question: str, labels: Sequence[str]) -> float:
        for label in labels:
            assert question not in self.asked[label], "asked twice"
            self.asked[label].append(question)
        return 1.0 + len(labels)

    def standing(self, label: str) -> Standing:
        places = [int(question[1:]) for question in self.asked[label]]
        known = self.agreeing[label]
        share = sum(known[place % len(known)] for place in places) / len(places)
        # dearer ones are nearer to full prefill, and one that always agrees is nearest
        cost = self.cost.get(label, 0.1 + 0.08 * list(self.agreeing).index(label))
        return standing(label, share, len(places), cost=cost, kl=1 - share)

    def race(self, *, target: float = 0.95, seconds: float = 1e9) -> Race:
        return race(
            list(self.agreeing), QUESTIONS, self.ask, self.standing, target=target,
            budget=Budget(seconds=seconds),
        )  # fmt: skip


answers = st.lists(st.booleans(), min_size=7, max_size=7)


@settings(max_examples=150, deadline=None)
@given(others=st.lists(answers, min_size=1, max_size=9), place=st.integers(0, 9))
def test_what_always_agrees_is_never_dropped(others: list[list[bool]], place: int) -> None:
    field = {f"other {n}": known for n, known in enumerate(others)}
    names = list(field)
    names.insert(min(place, len(names)), "always")
    found = Field({name: field.get(name, [True]) for name in names}).race()
    assert "always" not in found.dropped
    able = [label for label, each in found.standings.items() if each.agreement >= 0.95]
    assert able, "something at the target is known at the end, as there is something"


@settings(max_examples=100, deadline=None)
@given(field=st.lists(answers, min_size=1, max_size=9), seconds=st.floats(0.5, 300))
def test_it_keeps_to_its_seconds_but_for_one_question(
    field: list[list[bool]], seconds: float
) -> None:
    candidates = Field({f"c{n}": known for n, known in enumerate(field)})
    budget = Budget(seconds=seconds)
    race(
        list(candidates.agreeing), QUESTIONS, candidates.ask, candidates.standing, target=0.95,
        budget=budget,
    )  # fmt: skip
    # every answer takes a second here, which the budget knows from the first question on
    assert budget.spent <= max(seconds, 1 + len(field))


def test_it_ends_when_one_is_left_that_is_at_the_target() -> None:
    field = Field({"bad": [False], "good": [True], "dear": [True, False]})
    found = field.race()
    assert found.dropped == ["bad", "dear"] and found.left == ["good"]
    assert len(field.asked["good"]) == FIRST
    assert not found.is_out_of_time


def test_a_cheap_one_that_is_surely_above_the_target_ends_it() -> None:
    field = Field({"cheap": [True], "dear": [True]})
    found = field.race(target=0.6)
    assert found.left == ["cheap", "dear"]
    assert len(field.asked["cheap"]) == FIRST  # [.68, 1] of 8 of 8


def test_the_dearer_half_is_shelved_but_for_the_nearest() -> None:
    good, poor = [True], [True] * 6 + [False]  # 7 of 8
    field = Field({"a": poor, "b": poor, "c": poor, "d": poor, "e": poor, "nearest": good})
    found = field.race()
    assert "nearest" in found.left
    assert len(field.asked["nearest"]) > len(field.asked["d"]) == FIRST
    assert {"d", "e"} <= set(found.shelved)


def test_shelved_ones_come_back_when_all_others_are_out() -> None:
    """What agreed on the first questions and on no other gives way to what was dearer."""
    early = [True] * FIRST + [False] * 112
    field = Field({"a": early, "b": early, "dear": [True], "nearest": early}, {"nearest": 0.5})
    found = field.race()
    assert set(found.dropped) == {"a", "b", "nearest"} and found.left == ["dear"]


def test_what_is_slower_than_full_prefill_is_out_whatever_it_agrees() -> None:
    field = Field({"slow": [True], "even": [True], "poor": [False]}, {"slow": 1.1, "even": 1.0})
    found = field.race()
    assert found.dropped == ["slow", "poor"] and found.left == ["even"]
    assert len(field.asked["even"]) == len(QUESTIONS)  # 1.0 may be .94, measured again


def test_a_slow_one_at_the_target_does_not_end_the_search() -> None:
    """The cheaper one may still be enough, and is asked everything."""
    often = [True] * 15 + [False]
    field = Field({"cheap": often, "even": [True]}, {"even": 0.97})
    field.race()
    assert len(field.asked["cheap"]) == len(QUESTIONS)


def test_races_among_others_are_added() -> None:
    both = Field({"a": [False], "b": [True]}).race()
    both.include(Field({"c": [False], "d": [True]}).race())
    assert (both.dropped, both.left, set(both.standings)) == (["a", "c"], ["b", "d"], {*"abcd"})


def test_nothing_left_is_an_end_too() -> None:
    found = Field({"a": [False], "b": [False]}).race()
    assert (found.left, found.dropped) == ([], ["a", "b"])


def test_times_that_are_equal_within_noise_leave_the_choice_to_agreement() -> None:
    cheap = standing("cheap", 0.96, 50, cost=0.100)
    near = standing("near", 0.98, 50, cost=0.109)
    dear = standing("dear", 1.0, 50, cost=0.2)
    assert [s.label for s in cheapest_first([dear, cheap, near])] == ["near", "cheap", "dear"]
    closer = replace(cheap, label="closer", first_kl=0.01)
    smaller = replace(closer, label="smaller", kv_ratio=0.2)
    ordered = cheapest_first([cheap, closer, smaller])
    assert [s.label for s in ordered] == ["smaller", "closer", "cheap"]

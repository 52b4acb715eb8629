"""A run: it chooses on some questions, and checks on others. Right answers are what counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.lab.evaluation import Question
from samkv_integrations.lab.tuning import (
    LEAST_CHECKED,
    MOST_TRIED,
    Compared,
    Result,
    Run,
    candidates,
    runs,
)
from samkv_integrations.methods.guided import LARGE
from tests.support.models import tiny_model
from tests.support.table_runtime import TableRuntime

SETTINGS = candidates(4, 0)
LABELS = [*SETTINGS]
DEAR, CHEAP = "auto, first=48", "reuse"


def questions(n: int = 150) -> list[Question]:
    return [Question(id=str(i), question=f"q{i}", documents=("x",)) for i in range(n)]


HELD_OUT = {str(i) for i in range(250) if i % 5 >= 3}


def test_settings_that_a_runtime_does_not_run_are_left_out() -> None:
    assert all(runs(tiny_model(), setting) for setting in SETTINGS.values())
    by_tokens = [label for label in LABELS if runs(TableRuntime(), SETTINGS[label])]
    assert by_tokens == [label for label in LABELS if "quest" not in label]


def test_no_setting_is_tried_twice() -> None:
    """What `auto` recomputes depends on the model's size; `samkv-guided` is always the same."""
    for n_parameters in (0, LARGE - 1, LARGE):
        tried = [
            (replace(method, name="", summary="", paper="", else_way=""), each.eviction)
            for each in candidates(4, n_parameters).values()
            for method in [each.with_options.for_model(n_parameters)]
        ]
        assert all(each not in tried[:place] for place, each in enumerate(tried))
        assert ("samkv-guided" in candidates(4, n_parameters)) == (n_parameters >= LARGE)


class Fake:
    """Measures by a rule: whether an answer is right. Each answer takes a second."""

    def __init__(
        self,
        right: Callable[[str, str], bool],
        ttft_ratio: Callable[[str, str], float] = lambda label, _: 0.1 + LABELS.index(label) / 20,
        full: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.right, self.ttft_ratio, self.full, self.now = right, ttft_ratio, full, 0.0

    def compare(self, question: Question, labels: Sequence[str]) -> list[Compared]:
        self.now += 1 + len(labels)
        found = []
        for label in labels:
            right = self.right(label, question.id)
            found.append(
                Compared(
                    right=right, full=self.full(question.id),
                    ttft_ratio=self.ttft_ratio(label, question.id), kv_ratio=0.5,
                )
            )  # fmt: skip
        return found


def run(fake: Fake, n: int = 150, **options: Any) -> Result:
    made = Run(fake.compare, clock=lambda: fake.now, **{"minutes": 60, **options})
    return made.tune(LABELS, questions(n))


def only(*labels: str) -> Callable[[str, str], bool]:
    """These answer all questions right, all others every second one."""
    return lambda label, number: label in labels or int(number) % 2 == 0


def test_it_recommends_the_cheapest_with_as_many_right_answers_on_held_out_questions() -> None:
    found = run(Fake(only(DEAR, "auto, quest")))
    assert found.chosen is not None and found.chosen.label == "auto, quest"
    assert (found.chosen.right, found.chosen.questions) == (60, 60)  # all that were held out
    (cheap,) = (each for each in found.standings if each.label == CHEAP)
    assert cheap.questions < 48  # what loses so much is asked no more


def test_a_right_answer_that_full_prefill_has_not_makes_up_for_one_that_is_lost() -> None:
    """By agreement with full prefill this setting would be at .8, and full prefill recommended."""
    lost, won = (lambda number: int(number) % 10 == 3), (lambda number: int(number) % 10 == 8)
    found = run(Fake(lambda _, number: not lost(number), full=lambda number: not won(number)))
    assert found.chosen is not None and found.chosen.label == CHEAP
    assert (found.chosen.lost, found.chosen.won, found.chosen.difference) == (15, 15, 0)
    assert found.chosen.low < 0 < found.chosen.high


@pytest.mark.parametrize(("n_lost", "enough"), [(3, True), (4, False)])
def test_exactly_the_points_that_may_be_lost_are_enough(n_lost: int, enough: bool) -> None:
    lost = sorted(HELD_OUT)[:n_lost]
    found = run(Fake(lambda _, number: number not in lost), 250, lose=3)
    assert [each.questions for each in found.held_out] == [100] * MOST_TRIED
    assert (found.chosen is not None) == enough
    assert "within 3 points" in found.why or enough
    assert run(Fake(lambda _, number: number not in lost), 250, lose=4).chosen is not None


@pytest.mark.parametrize(("n_right", "told"), [(0, "0 of 48"), (12, "4 of 100")])
def test_full_prefill_that_answers_nearly_nothing_is_no_measure(n_right: int, told: str) -> None:
    """No setting loses anything then, and none of them is shown to be enough."""
    found = run(Fake(lambda *_: True, full=lambda number: int(number) < n_right), 250)
    assert found.chosen is None
    assert found.why.startswith(f"full prefill itself answers {told} questions right, too few")
    found = run(Fake(lambda *_: True, full=lambda number: int(number) % 2 == 0))
    assert found.chosen is not None


def test_what_fails_on_held_out_questions_gives_way_to_the_next() -> None:
    found = run(Fake(lambda label, number: label != CHEAP or number not in HELD_OUT))
    assert [each.label for each in found.held_out[:2]] == [CHEAP, "reuse, quest"]
    assert found.held_out[0].right == 0 and found.chosen is found.held_out[1]
    assert found.held_out[0].questions < LEAST_CHECKED  # and is asked no more


def test_a_slower_setting_does_not_win_by_a_few_questions_of_the_choice() -> None:
    lost = {"20", "30", "40"}
    assert not lost & HELD_OUT
    fast = "auto, quest"
    found = run(Fake(lambda label, number: label == DEAR or label == fast and number not in lost))
    assert [each.label for each in found.held_out[:2]] == [DEAR, fast]
    assert found.chosen is found.held_out[1]


def test_what_is_slow_is_not_recommended() -> None:
    slow = Fake(only(*LABELS), lambda label, number: 0.97 if number in HELD_OUT else 0.1)
    found = run(slow)
    assert found.chosen is None and "no faster setting" in found.why
    found = run(Fake(only(DEAR), lambda label, _: 1.0 if label == DEAR else 0.2))
    assert found.chosen is None
    assert run(Fake(only(*LABELS), lambda *_: 1.0)).chosen is None


@pytest.mark.parametrize("minutes", [0.05, 0.5, 2, 5])
@pytest.mark.parametrize("right", [(), (DEAR,)])
def test_it_keeps_to_its_minutes(minutes: float, right: tuple[str, ...]) -> None:
    """But for the first question, and the one that is under way."""
    fake = Fake(only(*right))
    found = run(fake, minutes=minutes)
    assert fake.now <= max(60 * minutes, 1 + len(LABELS))
    assert {each.questions > 0 for each in found.standings} == {True}
    if minutes < 1:
        assert found.chosen is None and "time was over" in found.why


def test_one_answered_question_chooses_nothing() -> None:
    """A first question that takes most of the minutes leaves time for both that are held out."""
    found = run(Fake(only(*LABELS)), 5, minutes=0.34)
    assert {each.questions for each in found.standings} == {1} and not found.held_out
    assert found.chosen is None
    assert "over after 1 of the 3 questions that are needed to choose a setting" in found.why
    found = run(Fake(only(*LABELS)), minutes=1.6)
    assert found.chosen is None and "after 10 of the 16 questions that are needed" in found.why
    assert run(Fake(only(*LABELS)), 5, minutes=1).chosen is not None


def test_what_cannot_be_measured_is_refused() -> None:
    for wrong in ({"lose": -1}, {"lose": 100}, {"lose": float("nan")}, {"minutes": 0}):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            Run(Fake(only()).compare, **wrong)

"""A run: it chooses on some questions, and checks on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.tuning.run import (
    LEAST_CHECKED,
    MOST_TRIED,
    Compared,
    Result,
    Run,
    TuneConfig,
    best_first,
    candidates,
    recommended,
)

SETTINGS = candidates("m", 4)
LABELS = [*SETTINGS]
DEAR, CHEAP = "auto, first=48, matched=192", "reuse"


def questions(n: int = 150) -> list[Question]:
    return [Question(id=str(i), question=f"q{i}", documents=("x",)) for i in range(n)]


HELD_OUT = {str(i) for i in range(150) if i % 5 >= 3}


class Fake:
    """Measures by a rule: whether a setting agrees on a question. Each answer takes a second."""

    def __init__(
        self,
        agrees: Callable[[str, str], bool],
        ttft_ratio: Callable[[str, str], float] = lambda label, _: 0.1 + LABELS.index(label) / 20,
    ) -> None:
        self.agrees, self.ttft_ratio, self.now = agrees, ttft_ratio, 0.0

    def compare(self, question: Question, labels: Sequence[str]) -> list[Compared]:
        self.now += 1 + len(labels)
        found = []
        for label in labels:
            same = self.agrees(label, question.id)
            found.append(
                Compared(
                    exact=float(same), f1=0.5 + same / 2, first_kl=1.0 - same,
                    first_top1=float(same), ttft_ratio=self.ttft_ratio(label, question.id),
                    bytes_read=10, kv_ratio=0.5,
                )
            )  # fmt: skip
        return found


def run(fake: Fake, n: int = 150, **options: Any) -> Result:
    config = TuneConfig(**{"minutes": 60, **options})
    return Run(config, fake.compare, lambda: fake.now).tune(LABELS, questions(n))


def only(*labels: str) -> Callable[[str, str], bool]:
    """These agree always, all others on every second question."""
    return lambda label, number: label in labels or int(number) % 2 == 0


def test_it_recommends_the_cheapest_that_agrees_on_held_out_questions() -> None:
    found = run(Fake(only(DEAR, "auto, quest@0.1")))
    assert found.chosen is not None and found.chosen.label == "auto, quest@0.1"
    assert found.chosen.agreement == 1.0 and found.chosen.n >= LEAST_CHECKED
    assert found.chosen.high - found.chosen.low <= 0.1
    assert CHEAP in found.out and DEAR not in found.out
    (cheap,) = (each for each in found.standings if each.label == CHEAP)
    assert cheap.n < 48  # what cannot reach the target is asked no more


def test_what_fails_on_held_out_questions_gives_way_to_the_next() -> None:
    found = run(Fake(lambda label, number: label != CHEAP or number not in HELD_OUT))
    assert [each.label for each in found.checked] == [CHEAP, "reuse, quest@0.1"]
    assert found.checked[0].agreement == 0.0 and found.chosen is found.checked[1]


def test_none_that_agrees_is_full_prefill_and_a_reason() -> None:
    found = run(Fake(only()))
    assert found.chosen is None and found.why == "no setting reaches 95 % agreement"
    assert found.out == {*LABELS}
    assert recommended(found, SETTINGS, TuneConfig(), "notes") is None


def test_no_more_than_a_few_are_tried_on_held_out_questions() -> None:
    found = run(Fake(lambda label, number: number not in HELD_OUT))
    assert len(found.checked) == MOST_TRIED and found.chosen is None
    assert found.why == ("what came nearest does not reach 95 % agreement on held-out questions")


def test_what_is_slow_on_held_out_questions_is_said_to_be_slow() -> None:
    slow = Fake(only(*LABELS), lambda label, number: 0.97 if number in HELD_OUT else 0.1)
    found = run(slow)
    assert found.chosen is None and found.why == (
        "what came nearest is not faster than full prefill on held-out questions"
    )


def test_what_agrees_may_be_slow_and_what_is_fast_may_not_agree() -> None:
    found = run(Fake(only(DEAR), lambda label, _: 1.0 if label == DEAR else 0.2))
    assert (found.chosen, found.why) == (None, "no faster setting reaches 95 % agreement")
    assert run(Fake(only(*LABELS), lambda *_: 1.0)).chosen is None


def test_few_questions_are_no_lack_of_time() -> None:
    found = run(Fake(only(*LABELS)), 10)
    assert found.chosen is not None and found.chosen.label == CHEAP
    assert found.chosen.n == 4  # all that were held out
    found = run(Fake(lambda label, number: number not in HELD_OUT), 10)
    assert found.chosen is None and "time was over" not in found.why


@pytest.mark.parametrize("minutes", [0.05, 0.5, 2, 5])
@pytest.mark.parametrize("agree", [(), (DEAR,)])
def test_it_keeps_to_its_minutes(minutes: float, agree: tuple[str, ...]) -> None:
    """But for the first question, and the one that is under way."""
    found = run(Fake(only(*agree)), minutes=minutes)
    assert found.seconds <= max(60 * minutes, 1 + len(LABELS))
    assert {each.n > 0 for each in found.standings} == {True}
    if minutes < 1:
        assert found.chosen is None and "time was over" in found.why


def test_the_same_answers_lead_to_the_same_end() -> None:
    assert run(Fake(only(DEAR))) == run(Fake(only(DEAR)))


def test_f1_may_be_what_agreement_is() -> None:
    found = run(Fake(only()), by="f1", agree=0.6)
    assert found.chosen is not None  # half of them have 1.0, the others .5


def test_a_check_asks_all_questions_that_there_is_time_for() -> None:
    fake = Fake(only())
    (one,) = Run(TuneConfig(minutes=60), fake.compare, lambda: fake.now).standings(
        [CHEAP], questions()
    )
    assert (one.n, one.agreement) == (150, 0.5) and one.low < 0.5 < one.high
    assert one.f1_interval[0] < one.f1 < one.f1_interval[1]
    short = Run(TuneConfig(minutes=0.001), fake.compare, lambda: fake.now)
    assert short.standings([CHEAP], questions())[0].n == 1


def test_times_within_noise_are_equal() -> None:
    """Of those whose times differ by less, the one that agrees most comes first."""
    times = dict(zip(LABELS, (0.20, 0.21, 0.3, 0.5, 0.51, 0.6), strict=True))
    fake = Fake(lambda label, n: label != LABELS[0] or n != "0", lambda label, _: times[label])
    standings = Run(TuneConfig(), fake.compare, lambda: fake.now).standings(LABELS, questions(9))
    assert [LABELS.index(each.label) for each in best_first(standings, 0.5)] == [1, 0, 2, 3, 4, 5]
    assert best_first(standings, 0.95)[-1].label == LABELS[0]  # it is below the target


def test_the_entry_says_what_it_was_measured_with() -> None:
    found = run(Fake(only(DEAR)))
    setting = recommended(found, SETTINGS, TuneConfig(), "notes")
    assert (
        setting is not None
        and found.chosen is not None
        and setting.line
        == ("--method auto --set recompute.first=48 --set recompute.matched=192 --eviction none")
    )
    assert setting.measured["collection"] == "notes" and setting.measured["agreement"] == 1.0
    assert setting.measured["held_out_questions"] == found.chosen.n
    assert setting.measured["held_out_tries"] == 1


def test_what_cannot_be_measured_is_refused() -> None:
    for wrong in ({"agree": 0.0}, {"agree": 1.5}, {"minutes": 0}, {"by": "bleu"}):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            TuneConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(EmptyInput, match=r"too few questions .* \(4\)"):
        run(Fake(only()), 4)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_candidates_can_be_written(bits: int) -> None:
    found = candidates("m", bits)
    assert len(found) <= 6 and {setting.store_bits for setting in found.values()} == {bits}
    for setting in found.values():
        assert setting.to_method().eviction is None or setting.eviction != "none"

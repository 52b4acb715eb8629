"""A run: it chooses on some questions, checks on others, and goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.journal import Journal
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.figures import Row
from samkv_integrations.tuning.candidates import FULL, Candidate, grid
from samkv_integrations.tuning.recommend import recommended
from samkv_integrations.tuning.run import LEAST_CHECKED, MOST_TRIED, Result, Run, TuneConfig, split

CANDIDATES = grid("m", 4)
LABELS = [candidate.label for candidate in CANDIDATES]
DEAR, CHEAP = "auto, first=48, matched=192", "reuse"


def questions(n: int = 150) -> list[Question]:
    return [
        Question(id=str(i), dataset="d", kind="d", question=f"q{i}", answers=(), documents=("x",))
        for i in range(n)
    ]


class Fake:
    """Measures by a rule: whether a candidate agrees on a question. Each answer takes a second."""

    def __init__(
        self, agrees: Callable[[str, int], bool], *, stop_after: int | None = None
    ) -> None:
        self.agrees, self.left, self.n_rows = agrees, stop_after, 0

    def rows(self, question: Question, labels: Sequence[str]) -> Iterator[Row]:
        for label in (FULL, *labels):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            self.n_rows += 1
            yield self.row(question, label)

    def row(self, question: Question, label: str) -> dict[str, Any]:
        row: dict[str, Any] = {"id": question.id, "label": label, "spent_s": 1.0, "ttft_s": 1.0}
        if label != FULL:
            same = self.agrees(label, int(question.id))
            row |= {
                "exact": float(same), "f1": 0.5 + same / 2, "first_kl": 1.0 - same,
                "first_top1": float(same), "answer_loglik": -1.0 - (not same),
                "full_answer_loglik": -1.0, "ttft_s": 0.1 + LABELS.index(label) / 20,
                "full_ttft_s": 1.0, "bytes_read": 10, "kv_bytes": 5, "full_kv_bytes": 10,
                "ran": "x",
            }  # fmt: skip
        return row


def run(
    folder: Path, fake: Fake, asked: Sequence[Question] | None = None, **options: Any
) -> tuple[Result, Journal]:
    with Journal(folder, {"a": 1}) as journal:
        config = TuneConfig(**options)
        found = Run(config, CANDIDATES, asked or questions(), fake, journal).run()
    return found, journal


def only(*labels: str) -> Callable[[str, int], bool]:
    """These agree always, all others on every second question."""
    return lambda label, number: label in labels or number % 2 == 0


def test_it_recommends_the_cheapest_that_agrees_on_held_out_questions(tmp_path: Path) -> None:
    found, _ = run(tmp_path, Fake(only(DEAR, "auto, quest@0.1")), minutes=60)
    assert found.chosen == "auto, quest@0.1"
    standing = found.chosen_standing
    assert standing is not None and standing.agreement == 1.0
    assert standing.n >= LEAST_CHECKED and standing.high - standing.low <= 0.1
    assert CHEAP in found.race.dropped


def test_what_fails_on_held_out_questions_gives_way_to_the_next(tmp_path: Path) -> None:
    choice, held_out = split(questions())
    assert len(choice) == 90 and len(held_out) == 60
    assert not {q.id for q in choice} & {q.id for q in held_out}
    fails_later = {q.id for q in held_out}
    fake = Fake(lambda label, n: label != CHEAP or str(n) not in fails_later)
    found, _ = run(tmp_path, fake, minutes=120)
    assert [each.is_enough for each in found.checked] == [False, True]
    assert found.checked[0].standing.label == CHEAP
    assert found.checked[0].standing.agreement == 0.0 and found.chosen == "reuse, quest@0.1"


def test_none_that_agrees_is_full_prefill_and_a_reason(tmp_path: Path) -> None:
    found, _ = run(tmp_path, Fake(only()), minutes=60)
    assert found.chosen is None and found.chosen_standing is None
    assert found.why == "no setting reaches 95 % agreement"
    assert set(found.race.dropped) == set(LABELS)  # those of other bits were tried as well
    assert recommended(found, CANDIDATES, TuneConfig(), "notes") is None


OTHERS = [each.label for each in CANDIDATES if not each.in_store]


def test_caches_of_other_bits_are_not_made_where_the_own_are_enough(tmp_path: Path) -> None:
    found, journal = run(tmp_path, Fake(only(DEAR, *OTHERS)), minutes=60)
    assert found.chosen == DEAR and not {label for _, label in journal.rows} & {*OTHERS}


def test_caches_of_other_bits_are_tried_when_all_others_are_refused(tmp_path: Path) -> None:
    later = {q.id for q in split(questions())[1]}
    fake = Fake(lambda label, n: label in OTHERS or str(n) not in later)
    found, _ = run(tmp_path, fake, minutes=240)
    assert found.chosen in OTHERS
    assert [each.is_enough for each in found.checked] == [False] * MOST_TRIED + [True]
    setting = recommended(found, CANDIDATES, TuneConfig(), "notes")
    assert setting is not None and setting.store_bits == 8
    assert setting.measured["held_out_tries"] == MOST_TRIED + 1


def test_caches_of_other_bits_are_tried_when_all_others_are_slow(tmp_path: Path) -> None:
    class Slow(Fake):
        def row(self, question: Question, label: str) -> dict[str, Any]:
            row = super().row(question, label)
            return row if label in (FULL, *OTHERS) else row | {"ttft_s": 0.97}

    found, _ = run(tmp_path, Slow(only(*LABELS)), minutes=240)
    assert found.chosen == OTHERS[0]


def test_what_agrees_on_held_out_questions_and_is_slow_there_is_said_to_be_slow(
    tmp_path: Path,
) -> None:
    later = {q.id for q in split(questions())[1]}

    class SlowLater(Fake):
        def row(self, question: Question, label: str) -> dict[str, Any]:
            row = super().row(question, label)
            return row | {"ttft_s": 0.97} if question.id in later and label != FULL else row

    found, _ = run(tmp_path, SlowLater(only(*LABELS, *OTHERS)), minutes=600)
    assert [each.is_enough for each in found.checked] == [False] * len(found.checked) != []
    assert found.why == (
        "what reaches 95 % agreement on held-out questions is not faster than full prefill"
    )


def test_no_more_than_a_few_are_tried_on_held_out_questions(tmp_path: Path) -> None:
    later = {q.id for q in split(questions())[1]}
    fake = Fake(lambda label, n: label not in OTHERS and str(n) not in later)
    found, _ = run(tmp_path, fake, minutes=600)
    assert [each.is_enough for each in found.checked] == [False] * MOST_TRIED
    assert found.why == "what came nearest does not reach 95 % agreement on held-out questions"


def test_few_questions_are_no_lack_of_time(tmp_path: Path) -> None:
    found, _ = run(tmp_path / "all", Fake(only(*LABELS)), questions(10), minutes=60)
    assert found.chosen == CHEAP and found.checked[0].standing.n == 4  # all that were held out
    later = {q.id for q in split(questions(10))[1]}
    fake = Fake(lambda label, n: str(n) not in later)
    found, _ = run(tmp_path / "none", fake, questions(10), minutes=60)
    assert found.chosen is None and "time was over" not in found.why


def test_what_agrees_may_be_slow_and_what_is_fast_may_not_agree(tmp_path: Path) -> None:
    class Slow(Fake):
        def row(self, question: Question, label: str) -> dict[str, Any]:
            row = super().row(question, label)
            return row | {"ttft_s": 1.0} if label == DEAR else row

    found, _ = run(tmp_path, Slow(only(DEAR)), minutes=60)
    assert (found.chosen, found.why) == (None, "no faster setting reaches 95 % agreement")


def test_a_check_needs_no_more_than_a_question(tmp_path: Path) -> None:
    with Journal(tmp_path, {}) as journal:
        config = TuneConfig(minutes=0.001)
        one = Run(config, CANDIDATES, questions(3), Fake(only()), journal).measure_all(CHEAP)
    assert (one.n, one.agreement) == (1, 1.0)


def test_a_setting_as_slow_as_full_prefill_is_no_recommendation(tmp_path: Path) -> None:
    class Slow(Fake):
        def row(self, question: Question, label: str) -> dict[str, Any]:
            return super().row(question, label) | {"ttft_s": 1.0}

    found, _ = run(tmp_path, Slow(only(*LABELS)), minutes=60)
    assert found.chosen is None and found.why == "no setting is faster than full prefill here"


@pytest.mark.parametrize("minutes", [0.05, 0.5, 2, 5])
def test_it_keeps_to_its_minutes(tmp_path: Path, minutes: float) -> None:
    found, journal = run(tmp_path, Fake(only(DEAR)), minutes=minutes)
    first = 1 + sum(candidate.in_store for candidate in CANDIDATES)
    assert found.seconds <= max(60 * minutes, first)
    assert len(journal.rows) <= max(60 * minutes, first)
    if minutes < 1:
        assert found.chosen is None and "time was over" in found.why


def test_the_same_rows_lead_to_the_same_end_and_nothing_is_measured_again(tmp_path: Path) -> None:
    agrees = only(DEAR, "auto, quest@0.1")
    once, _ = run(tmp_path, Fake(agrees), minutes=6)
    again = Fake(agrees)
    twice, _ = run(tmp_path, again, minutes=6)
    assert again.n_rows == 0 and twice == once


def test_more_minutes_go_on_with_the_rows_that_are_there(tmp_path: Path) -> None:
    agrees, later = only(DEAR), Fake(only(DEAR))
    cut, journal = run(tmp_path / "cut", Fake(agrees), minutes=1)
    n_before = len(journal.rows)
    more, journal = run(tmp_path / "cut", later, minutes=60)
    whole, _ = run(tmp_path / "whole", Fake(agrees), minutes=60)
    assert more == whole and more.chosen == DEAR and cut.seconds <= 60
    assert len(journal.rows) > n_before > 0


def test_a_run_that_was_stopped_goes_on_and_ends_as_if_it_had_not(tmp_path: Path) -> None:
    agrees = only(DEAR)
    whole, _ = run(tmp_path / "whole", Fake(agrees), minutes=6)
    for after in (5, 40, 60):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", Fake(agrees, stop_after=after), minutes=6)
    resumed, _ = run(tmp_path / "cut", Fake(agrees), minutes=6)
    assert resumed == whole


def test_f1_may_be_what_agreement_is(tmp_path: Path) -> None:
    found, _ = run(tmp_path, Fake(only()), minutes=60, by="f1", agree=0.6)
    assert found.chosen is not None  # half of them have 1.0, the others .5


def test_the_entry_says_what_it_was_measured_with(tmp_path: Path) -> None:
    config = TuneConfig(minutes=60)
    found, _ = run(tmp_path, Fake(only(DEAR)), minutes=60)
    setting = recommended(found, CANDIDATES, config, "notes")
    assert setting is not None and setting.line == (
        "--method auto --set recompute.first=48 --set recompute.matched=192 --eviction none"
    )
    assert setting.measured["collection"] == "notes" and setting.measured["agreement"] == 1.0
    assert setting.measured["held_out_questions"] == found.checked[0].standing.n
    assert setting.measured["held_out_tries"] == 1


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for wrong in ({"agree": 0.0}, {"agree": 1.5}, {"minutes": 0}, {"by": "bleu"}):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            TuneConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(EmptyInput, match="4 questions are too few"):
        run(tmp_path, Fake(only()), questions(4))


def test_candidates_have_names_of_their_own_and_can_be_written(tmp_path: Path) -> None:
    assert len(set(LABELS)) == len(LABELS)
    for candidate in [*CANDIDATES, *grid("m", 8), *grid("m", 16)]:
        assert isinstance(candidate, Candidate)
        assert candidate.method.eviction is None or candidate.setting.eviction != "none"
    assert {c.setting.store_bits for c in grid("m", 8)} == {4, 8}

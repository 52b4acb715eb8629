"""The judge: what is a right answer, and how two methods are compared."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samkv_integrations.lab.evaluation import Paired, is_in_documents, is_right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("It was Enric Bernat, in 1958.", ["Enric Bernat"], True),
        ("it was ENRIC BERNAT", ["Bernat", "Enric  Bernat."], True),
        ("The Beatles", ["Beatles"], True),  # articles and case do not count
        ("Beatlesque music", ["Beatles"], False),  # whole words only
        ("Bernat, Enric", ["Enric Bernat"], False),
        ("In 1,176 of them", ["1,176"], True),
        ("", ["Bernat"], False),
        ("anything", ["the"], False),  # a gold answer of no words is never met
        ("Yes, it can.", ["yes"], True),
        ("It can, yes.", ["yes"], False),  # judged by the first word
        ("No.", ["yes"], False),
        ("Noah's ark", ["no"], False),
        ("Nothing; yes", ["no", "nothing"], True),
    ],
)
def test_what_is_right(answer: str, gold: list[str], right: bool) -> None:
    assert is_right(answer, gold) is right


def test_a_gold_answer_that_stands_in_no_document_is_seen() -> None:
    assert is_in_documents(["Bernat"], ["Founded by Enric Bernat.", "Else."])
    assert not is_in_documents(["Dali"], ["Founded by Enric Bernat."])
    assert is_in_documents(["no"], ["Nothing of that."])  # who answers yes or no copies nothing


answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200)


@given(answers)
def test_pairs_are_counted_and_the_interval_holds_the_difference(
    pairs: list[tuple[bool, bool]],
) -> None:
    mine, full = zip(*pairs, strict=True)
    found = Paired.of(mine, full)
    assert (found.questions, found.right, found.full) == (len(pairs), sum(mine), sum(full))
    assert found.won - found.lost == found.right - found.full
    assert found.lost == sum(theirs and not own for own, theirs in pairs)
    assert found.difference == (found.right - found.full) / len(pairs)
    assert -1 <= found.low <= found.high <= 1
    slack = 1 / len(pairs)  # quantiles of a few values
    assert found.low - slack <= found.difference <= found.high + slack
    turned = Paired.of(full, mine)
    assert (turned.lost, turned.won) == (found.won, found.lost) and turned.p == found.p


@given(st.integers(0, 30), st.integers(0, 30))
def test_p_is_mcnemars_exact_one(lost: int, won: int) -> None:
    mine = [False] * lost + [True] * won + [True] * 5
    full = [True] * lost + [False] * won + [True] * 5
    n = lost + won
    tail = sum(comb(n, k) for k in range(min(lost, won) + 1)) / 2**n
    assert Paired.of(mine, full).p == pytest.approx(min(1, 2 * tail))


def test_more_questions_narrow_the_interval() -> None:
    few = Paired.of([True, False] * 20, [False, True] * 20)
    many = Paired.of([True, False] * 320, [False, True] * 320)
    assert many.high - many.low < 0.3 * (few.high - few.low)
    assert few.points.startswith("+0.0 (-")

"""Which job comes next, by what each owner has had."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from samkv_integrations.serving.answers import RunningAnswer
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.turns import Call, Limits, Turns


def answer(owner: str) -> RunningAnswer:
    found: RunningAnswer = Mock(
        spec=RunningAnswer, owner=owner, is_complete=False, is_abandoned=False, pieces=()
    )
    return found


def call(owner: str) -> Call:
    return Call(owner=owner, call=lambda: None, fail=lambda error: None)


@pytest.mark.parametrize("kind", [Turns, FairTurns])
def test_the_next_call_waits_until_answers_have_had_as_much_time(kind: type[Turns]) -> None:
    turns, running, again = kind(Limits()), [answer("me")], call("me")
    assert turns.next([again], running, None) is again
    turns.has_called("me", 2.0)
    turns.charge("me", 1.9)
    assert turns.next([again], running, None) is None
    assert turns.next([again], [], None) is again  # there is no answer to wait for
    turns.charge("me", 0.2)
    assert turns.next([again], running, None) is again


def test_an_owner_takes_more_than_half_of_the_places_only_alone() -> None:
    turns, running = FairTurns(Limits(max_batch=4)), [answer("many"), answer("many")]
    third, few = answer("many"), answer("few")
    assert turns.next([third], running, None) is third
    assert turns.next([third, few], running, None) is few
    assert turns.next([third], [*running, few], None) is None


def test_an_owner_that_has_had_less_time_gets_a_step_within_a_pass_of_another() -> None:
    turns = FairTurns(Limits())
    turns.charge("many", 1.0)
    assert turns.is_owed_a_step([answer("few")], call("many"))
    assert not turns.is_owed_a_step([answer("many")], call("few"))

"""Sequences in memory: which is found, how much of it serves a prompt, and what makes room."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samkv_integrations.plan.kept_sequences import (
    LEAST,
    KeptSequence,
    KeptSequences,
    Match,
    Wanted,
)
from samkv_integrations.prompt.layout import n_in_common

Index = KeptSequences[str]

HEAD = list(range(100, 120))
CHUNK = list(range(200, 240))
QUESTION = list(range(300, 310))
ANSWER = list(range(400, 412))
PROMPT = HEAD + CHUNK + QUESTION
NEXT = list(range(500, 510))


def sequence(token_ids: Sequence[int] = (*PROMPT, *ANSWER), **changed: Any) -> KeptSequence[str]:
    """A prompt whose chunk was blended, and its answer."""
    fields: dict[str, Any] = {
        "made_by": "model", "way": "auto", "deletion": 1, "n_exact": len(HEAD),
        "prompts": (range(len(HEAD), len(PROMPT)),), "entries": "first", "n_bytes": 10,
    }  # fmt: skip
    fields["from_cache"] = np.zeros(len(token_ids), np.bool_)
    return KeptSequence(token_ids=np.array(token_ids), **fields | changed)


def wanted(token_ids: Sequence[int], **changed: Any) -> Wanted:
    fields: dict[str, Any] = {
        "made_by": "model", "way": "auto", "deletion": 1, "first_chunk": len(HEAD),
    }  # fmt: skip
    fields["n_asked"] = len(token_ids)
    return Wanted(token_ids=np.array(token_ids), **fields | changed)


def index_of(*sequences: KeptSequence[str], max_bytes: int = 1000) -> Index:
    index = Index(max_bytes)
    for each in sequences:
        assert index.keep(each)
    return index


def found(match: Match[str]) -> tuple[int, bool]:
    return match.n_tokens, match.is_follow_up


FOLLOW_UPS = {
    "the next turn": (PROMPT + ANSWER + NEXT, len(PROMPT + ANSWER)),
    "an answer that the client tokenises otherwise": (
        PROMPT + ANSWER[:-3] + [7] + NEXT, len(PROMPT + ANSWER) - 3,
    ),
    "another turn behind the same answer": (PROMPT + ANSWER[:5] + NEXT, len(PROMPT) + 5),
    "the same prompt": (PROMPT, len(PROMPT) - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOW_UPS)
def test_a_follow_up_goes_on_up_to_the_first_token_that_differs(name: str) -> None:
    token_ids, n_tokens = FOLLOW_UPS[name]
    assert found(index_of(sequence()).go_on(wanted(token_ids))) == (n_tokens, True)


OTHERS = {
    "another question over the same chunk": HEAD + CHUNK + NEXT,
    "a question that begins alike": PROMPT[:-1] + NEXT,
    "the question cut": PROMPT[:-1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_prompt_that_only_begins_alike_takes_what_no_question_changed(name: str) -> None:
    assert found(index_of(sequence()).go_on(wanted(OTHERS[name]))) == (len(HEAD), False)


def test_its_own_first_chunk_ends_what_it_takes_of_a_prompt_that_had_none_there() -> None:
    plain = sequence(PROMPT, n_exact=len(PROMPT), prompts=(range(len(PROMPT), len(PROMPT)),))
    other = wanted(HEAD + CHUNK + NEXT, first_chunk=len(HEAD))
    assert found(index_of(plain).go_on(other)) == (len(HEAD), False)
    assert index_of(plain).exact(other).n_tokens == len(HEAD + CHUNK)


def test_a_later_turns_chunk_is_not_taken_by_another_question_of_that_turn() -> None:
    start = len(PROMPT + ANSWER) + 3
    second = PROMPT + ANSWER + NEXT[:3] + CHUNK[::-1] + NEXT
    kept = sequence(
        second + ANSWER, prompts=(range(len(HEAD), len(PROMPT)), range(start, len(second)))
    )
    other = second[:-1] + [8, 9]
    assert found(index_of(kept).go_on(wanted(other))) == (start, True)
    assert found(index_of(kept).go_on(wanted(second + ANSWER + NEXT))) == (len(second) + 12, True)


class TestOtherMethods:
    """What one method blended, another one does not take; what is exact, all do."""

    def test_blended(self) -> None:
        asked = wanted(PROMPT + ANSWER + NEXT, way="reuse")
        assert found(index_of(sequence()).go_on(asked)) == (len(HEAD), False)
        assert index_of(sequence()).exact(asked).n_tokens == len(HEAD)

    def test_exact(self) -> None:
        full = sequence(way="recompute", n_exact=len(PROMPT))
        asked = wanted(PROMPT + ANSWER + NEXT)
        assert found(index_of(full).go_on(asked)) == (len(PROMPT), True)

    def test_the_same_prompt_is_answered_anew(self) -> None:
        """Else a method that is compared with full prefill would be full prefill."""
        n_asked = len(PROMPT) - 3  # the template opens an answer with three tokens
        full = sequence(
            way="recompute", n_exact=len(PROMPT + ANSWER), prompts=(range(len(HEAD), n_asked),)
        )
        index = index_of(full)
        assert found(index.go_on(wanted(PROMPT, n_asked=n_asked))) == (len(HEAD), False)
        later = PROMPT + ANSWER + NEXT
        assert found(index.go_on(wanted(later))) == (len(PROMPT + ANSWER), True)


@pytest.mark.parametrize("changed", [{"made_by": "another"}, {"deletion": 2}, {"deletion": -1}])
def test_another_model_or_a_deletion_finds_nothing(changed: dict[str, Any]) -> None:
    asked = wanted(PROMPT + ANSWER + NEXT, **changed)
    index = index_of(sequence())
    assert index.go_on(asked) == index.exact(asked) == Match()


def test_what_began_before_a_deletion_is_dropped() -> None:
    index = index_of(sequence(), sequence(CHUNK, deletion=2))
    index.follow(-1)  # no answer from the store
    assert index.n_bytes == 20
    index.follow(2)
    assert index.n_bytes == 10
    assert index.keep(sequence(deletion=1))  # it ended after the deletion, and is found by nobody
    assert index.go_on(wanted(PROMPT + ANSWER + NEXT, deletion=2)) == Match()
    index.follow(2)
    assert index.n_bytes == 10


def test_without_an_answer_from_the_store_nothing_is_kept() -> None:
    assert not Index(1000).keep(sequence(deletion=-1))


def test_a_turn_takes_the_place_of_the_turn_before() -> None:
    later = sequence([*PROMPT, *ANSWER[:-2], *NEXT], n_bytes=20)
    index = index_of(sequence(), later)
    assert index.n_bytes == 20
    assert found(index.go_on(wanted(PROMPT + ANSWER + NEXT))) == (len(PROMPT + ANSWER) - 2, True)


def test_another_prompt_takes_exact_entries_only() -> None:
    """A short beginning may have been computed in a faster and less exact way."""
    rounded = sequence(n_exact=LEAST + 1)
    assert found(index_of(rounded).go_on(wanted(HEAD + CHUNK + NEXT))) == (LEAST + 1, False)


def test_the_own_conversation_comes_before_a_longer_one_of_another_method() -> None:
    asked = wanted(PROMPT + ANSWER + NEXT)
    own, other = sequence(PROMPT + ANSWER[:4]), sequence(way="reuse", n_exact=len(PROMPT + ANSWER))
    assert index_of(own, other).go_on(asked).sequence is own


def test_tensors_that_have_grown_beyond_the_budget_are_not_held() -> None:
    """Those of the prompt alone were small enough."""
    index = Index(15)
    assert index.keep(sequence(PROMPT, entries="growing"))
    assert not index.keep(sequence(entries="growing", n_bytes=16))
    assert index.n_bytes == 0


KEPT_BESIDE = {
    "another prompt of the same length": {"prompts": (range(len(HEAD), len(PROMPT) - 1),)},
    "another question of as many tokens": {"token_ids": [*PROMPT[:-3], 7, 8, 9, ANSWER[0]]},
    "a branch": {"token_ids": [*PROMPT, *ANSWER[:2], *NEXT]},
    "another method": {"way": "reuse"},
    "what is exact": {"n_exact": len(PROMPT), "way": "recompute"},
    "another model": {"made_by": "another"},
}


@pytest.mark.parametrize("name", KEPT_BESIDE)
def test_what_serves_other_prompts_stays(name: str) -> None:
    index = index_of(sequence(**KEPT_BESIDE[name]), sequence())
    assert index.n_bytes == 20


def test_the_least_recently_used_makes_room() -> None:
    sequences = [sequence([n, *PROMPT, *ANSWER]) for n in range(4)]
    index = index_of(*sequences[:3], max_bytes=30)
    head = wanted([0, *PROMPT[:-1]], first_chunk=len(HEAD) + 1)
    assert index.go_on(head).sequence is sequences[0]
    index.keep(sequences[3])
    assert index.n_bytes == 30
    left = [n for n in range(4) if index.exact(wanted([n, *PROMPT, *ANSWER])).sequence]
    assert left == [0, 2, 3]


def test_what_is_larger_than_the_budget_is_not_kept_and_this_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index = Index(15)
    with caplog.at_level(logging.WARNING):
        assert index.keep(sequence(CHUNK, entries="second"))
        for _ in range(2):
            assert not index.keep(sequence(n_bytes=16))
    assert index.n_bytes == 10
    (said,) = caplog.messages
    assert "16 bytes" in said and "prefix_bytes=15" in said


def test_a_budget_of_0_keeps_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert not Index(0).keep(sequence())
    assert not caplog.messages


# -- the whole rule, against a slow one --------------------------------------------------------


@given(
    turns=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=5),
    blended=st.lists(st.booleans(), min_size=5, max_size=5),
    asked=st.lists(st.integers(0, 1), max_size=30),
)
def test_a_prompt_never_takes_half_of_what_was_blended_for_another(
    turns: list[list[int]], blended: list[bool], asked: list[int]
) -> None:
    """Turns alternate between prompt and answer, behind one head; token by token."""
    ids, prompts = list(HEAD), []
    for number, turn in enumerate(turns):
        if number % 2 == 0:
            stop = len(ids) + len(turn)
            prompts.append(range(len(ids) if blended[number] else stop, stop))
        ids += turn
    kept = sequence(ids, n_exact=prompts[0].start, prompts=tuple(prompts))
    prompt = HEAD + asked + [9]
    n_tokens, is_follow_up = found(index_of(kept).go_on(wanted(prompt, first_chunk=len(HEAD))))
    agree = n_in_common(np.array(ids), np.array(prompt))
    usable = [
        n for n in range(agree + 1)
        if not any(of.start < n < of.stop for of in prompts)
        and (n <= len(HEAD) or n >= prompts[0].stop)
    ]  # fmt: skip
    longest = max(usable)
    assert n_tokens == longest >= LEAST
    assert is_follow_up == (longest >= prompts[0].stop)

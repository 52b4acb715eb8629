"""The doctor's round ends with right answers, of all questions and for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from samkv_integrations import evaluation as checkup
from samkv_integrations.engine.doctor import Check
from samkv_integrations.engine.engine import Engine
from samkv_integrations.evaluation import is_in_documents
from samkv_integrations.model.model import Model
from tests.support.models import byte_tokenizer, hf_model, tiny_model

FULL = "recompute"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Check]:
    """The check where each method has so many right answers, all else is wrong."""

    def made(**n_right: int) -> Check:
        left = {FULL: 0, **dict.fromkeys(checkup.CHECKED_METHODS, 0)} | n_right
        if "guided" in left:
            left["samkv-guided"] = left.pop("guided")
        gold = iter([one.answers[0] for one in checkup.own_questions()])

        def answer(*_: Any, method: str, **__: Any) -> SimpleNamespace:
            nonlocal now
            now = next(gold) if method == FULL else now
            left[method] -= 1
            return SimpleNamespace(text=f"It is {now}." if left[method] >= 0 else "Nobody knows.")

        now = ""
        monkeypatch.setattr(Engine, "generate", lambda engine, *a, **named: answer(*a, **named))
        model = tiny_model()
        return checkup.right_answers(model, 16, Engine(model).costs, checkup.own_questions())

    return made


def test_it_says_how_many_are_right_of_all(checked: Callable[..., Check]) -> None:
    check = checked(recompute=7, reuse=5, epic=6, guided=7, auto=8)
    assert check.ok and check.is_warning and check.detail.startswith(
        "right answers, of 12 questions over short chunks: full prefill 7, reuse 5, epic 6, "
        "samkv-guided 7, auto 8; reuse: fewer than full prefill; "
    )  # fmt: skip


def test_one_fewer_of_twelve_is_no_warning(checked: Callable[..., Check]) -> None:
    assert not checked(recompute=12, reuse=11, epic=11, guided=12, auto=12).is_warning
    assert checked(recompute=12, reuse=12, epic=12, guided=12, auto=10).is_warning
    assert not checked(recompute=2, reuse=1, epic=1, guided=12, auto=12).is_warning


@pytest.mark.parametrize("n_right", [0, 1])
def test_a_model_that_answers_nothing_cannot_be_judged(
    checked: Callable[..., Check], n_right: int
) -> None:
    """Nothing is lost then, which is no praise of any method."""
    check = checked(recompute=n_right)
    assert check.is_warning and f"full prefill {n_right}, reuse 0, epic 0" in check.detail
    assert "they cannot judge this model; 'samkv tune' counts" in check.detail


def test_answers_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gold is what full prefill says here: it is right, and the others where they say it too."""
    monkeypatch.setattr(checkup, "CHECKED_METHODS", ("reuse",))
    model = tiny_model()
    engine = Engine(model, store_bits=16, prefix_bytes=0)
    asked, n_same = [], 0
    for one in checkup.own_questions()[:4]:
        engine.cache_chunks(one.documents)
        full, reused = (
            engine.generate(
                one.prompt(chat=True), one.documents, method=name,
                max_new_tokens=32,
            ).text
            for name in (FULL, "reuse")
        )  # fmt: skip
        asked.append(replace(one, answers=(full,)))
        n_same += full == reused
    check = checkup.right_answers(model, 16, engine.costs, asked)
    assert f"of 4 questions over short chunks: full prefill 4, reuse {n_same};" in check.detail


def test_the_doctors_own_questions_can_be_answered() -> None:
    asked = checkup.own_questions()
    assert len({one.question for one in asked}) == checkup.ONE_IN == len(asked)
    assert all(is_in_documents(one.answers, one.documents) for one in asked)
    assert len({one.documents[0] for one in asked}) > 5  # in rotation


def test_prompts_that_do_not_fit_are_a_warning() -> None:
    hf = hf_model("llama", max_position_embeddings=512)
    model = Model(hf, byte_tokenizer(bos=True), "short")
    check = checkup.right_answers(model, 16, Engine(model).costs, checkup.own_questions())
    assert check.ok and check.is_warning and "512" in check.detail

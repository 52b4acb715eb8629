"""What many answers come to, and its table."""

from __future__ import annotations

import pytest

from samkv_integrations import formatting
from samkv_integrations.cli import answers
from samkv_integrations.engine.engine import Engine
from samkv_integrations.evaluation.questions import Question, question_of
from tests.support.models import tiny_model


def _row(
    method: str, question: str, answer: str, *, right: bool, **changed: float
) -> formatting.Row:
    known = {"expected": ["x"], "right": right}
    base = {
        "kept_ratio": 0.5,
        "recompute_ratio": 0.25,
        "bytes_read": 100,
        "ttft_s": 1.0,
        "answer_s": 2.0,
    }
    named = {"method": method, "ran": method, "eviction": None}
    return named | {"question": question, "answer": answer} | known | base | changed


def test_summary_of_many_answers() -> None:
    rows = [
        _row("recompute", "a", "x", right=True, ttft_s=1.0),
        _row("reuse", "a", "x", right=True, ttft_s=0.5, bytes_read=1000),
        _row("recompute", "b", "x", right=True, ttft_s=3.0),
        _row(
            "reuse",
            "b",
            "y",
            right=False,
            ttft_s=0.5,
            bytes_read=3000,
            kept_ratio=1.0,
        ),
    ]
    full, reuse = answers.summarise(rows)
    assert (full["method"], full["n_right"], full["n_known"], full["same_share"]) == (
        "recompute",
        2,
        2,
        1.0,
    )
    assert (reuse["n_right"], reuse["same_share"], reuse["kept_ratio"]) == (1, 0.5, 0.75)
    assert (reuse["bytes_read"], reuse["bytes_share"], full["bytes_share"]) == (2000, 1.0, 0.05)
    assert reuse["ttft_s"] == 0.5
    assert reuse["ttft_ratio"] == pytest.approx((0.5 / 1.0 + 0.5 / 3.0) / 2)  # paired by question
    (alone,) = answers.summarise(rows[1::2])
    assert (alone["same_share"], alone["ttft_ratio"]) == (None, None)


def test_an_answer_is_right_if_a_gold_answer_stands_in_it() -> None:
    report = Engine(tiny_model()).generate("How many books?", [], max_new_tokens=1).report
    asked = Question(question="How many books?", answers=("5,120",))
    for text, right in (("It holds 5120 books.", True), ("It holds 51 books.", False)):
        row = answers.answer_row(asked, text, [], report)
        assert (row["right"], row["exact_match"]) == (right, 0.0)
    assert "right" not in answers.answer_row(question_of("How many?"), "5120", [], report)

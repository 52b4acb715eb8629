"""F1 of an answer is LongBench's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samkv_integrations.evaluation.measures import exact_match, f1_score

RECORDED = Path(__file__).parent / "data" / "longbench_f1.json"
CASES = json.loads(RECORDED.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['prediction']}|{c['reference']}")
def test_f1_is_longbench_s(case: dict[str, object]) -> None:
    found = f1_score(str(case["prediction"]), [str(case["reference"])])
    assert found == pytest.approx(case["score"], abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "expected", "exact", "f1"),
    [
        ("The  Red Lion!", ["red lion"], 1, 1),
        ("red", ["red lion"], 0, 2 / 3),
        ("well-known", ["wellknown"], 1, 1),
        ("a cat sat", ["dog", "cat sat down"], 0, 4 / 5),
        ("", ["x"], 0, 0),
        ("x x", ["x"], 0, 2 / 3),
    ],
)
def test_the_best_of_the_expected_answers_counts(
    answer: str, expected: list[str], exact: int, f1: float
) -> None:
    """Worked out by hand."""
    assert exact_match(answer, expected) == exact
    assert f1_score(answer, expected) == pytest.approx(f1)

"""Scores of an answer are LongBench's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scoring
from samkv_integrations.errors import SamkvError
from samkv_integrations.evaluation import measures

RECORDED = Path(__file__).parent / "data" / "longbench_scoring_cases.json"


CASES = json.loads(RECORDED.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize(
    "case", CASES["qa_f1_score"], ids=lambda c: f"{c['prediction']}|{c['reference']}"
)
def test_english_scores_are_longbench_s(case: dict[str, object]) -> None:
    found = measures.f1_score(str(case["prediction"]), [str(case["reference"])])
    assert found == pytest.approx(case["score"], abs=1e-6)


@pytest.mark.parametrize("name", ["qa_f1_zh_score", "rouge_zh_score"])
def test_chinese_scores_are_longbench_s(name: str) -> None:
    pytest.importorskip("jieba", reason="of the extra 'bench'")
    pytest.importorskip("rouge", reason="of the extra 'bench'")
    score = getattr(scoring, name)
    assert CASES[name]
    for case in CASES[name]:
        found = score(case["prediction"], case["reference"])
        assert found == pytest.approx(case["score"], abs=1e-6), case


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
    assert scoring.scores(answer, expected, "en") == {"exact_match": exact, "f1": pytest.approx(f1)}


def test_chinese_answers_have_both_scores() -> None:
    pytest.importorskip("jieba", reason="of the extra 'bench'")
    pytest.importorskip("rouge", reason="of the extra 'bench'")
    found = scoring.scores("北京。", ["上海", "北京"], "zh")
    assert found["exact_match"] == found["f1"] == 1
    assert 0 < found["rouge_l"] < 1  # it counts the punctuation


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("jieba", "rouge"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            with pytest.raises(SamkvError, match=rf"'{package}' is not installed.*\[bench\]"):
                scoring.require_extras("zh")
    scoring.require_extras("en")

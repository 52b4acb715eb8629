"""With `recompute`, answers are those of transformers, of ChatHuggingFace and of HuggingFaceLLM.

The table is in `benchmarks.same_as_transformers`. The classes that it compares with are no
dependency of the tests; where they are installed, they are asked as well.
"""

from __future__ import annotations

import pytest

from benchmarks.same_as_transformers import PAIRS, SETS, measure

FEW = 3
TRANSFORMERS, *OTHERS = PAIRS


@pytest.mark.parametrize(
    "asked",
    [
        # longer prompts
        pytest.param(name, marks=pytest.mark.slow if name == "package descriptions" else ())
        for name in SETS
    ],
)
def test_recompute_answers_as_transformers_generates(asked: str) -> None:
    row = measure(TRANSFORMERS, asked, FEW)
    assert row.same == row.questions == FEW
    assert row.different == FEW and row.found == row.given > FEW


@pytest.mark.slow  # twice as many questions
def test_another_method_does_not_always() -> None:
    """So that being the same says something: `reuse` loses what needs another document."""
    assert measure(TRANSFORMERS, "sample questions", 2 * FEW, "reuse").same < 2 * FEW


@pytest.mark.parametrize("pair", OTHERS)
def test_recompute_answers_as_the_class_that_it_replaces(pair: str) -> None:
    pytest.importorskip("langchain_huggingface")
    pytest.importorskip("llama_index.llms.huggingface")
    row = measure(pair, "sample questions", FEW)
    assert row.same == row.questions == FEW

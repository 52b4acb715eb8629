"""A question asked of settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.lab.evaluation import Question
from samkv_integrations.lab.tuning import FULL, Measurer, candidates
from tests.support.models import tiny_model
from tests.support.stores import chunk_files

TEXTS = tuple(
    f"[Town {n}]\nThe river of town {n} is called R{n}, and its fair is in May." for n in range(3)
)
QUESTION = Question(id="q", question="Which river?", documents=TEXTS)
SETTINGS = candidates(4, 0)
LABELS = ("reuse", "auto, quest", "auto, first=48")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    made = Engine(tiny_model(), ChunkStore(tmp_path / "kv"), block_size=8, prefix_bytes=0)
    made.cache_chunks(TEXTS)
    return made


@pytest.fixture
def measurer(engine: Engine) -> Measurer:
    return Measurer(engine, SETTINGS, max_new_tokens=6, chat=False)


def answer_of(engine: Engine, method: str) -> str:
    return engine.generate(QUESTION.prompt(), TEXTS, method=method, max_new_tokens=6).text


def test_gold_answers_judge_full_prefill_too(engine: Engine, measurer: Measurer) -> None:
    """A setting may be right where full prefill is not."""
    full, reuse = answer_of(engine, FULL), answer_of(engine, "reuse")
    assert full != reuse
    for gold, expected in ((reuse, (True, False)), (full, (False, True))):
        (found,) = measurer.compare(replace(QUESTION, answers=(gold,)), ["reuse"])
        assert (found.right, found.full) == expected, gold


def test_nothing_of_one_question_is_left_for_the_next(engine: Engine, measurer: Measurer) -> None:
    before = chunk_files(engine.store.path)  # type: ignore[attr-defined]
    asked = replace(QUESTION, answers=("R1",))
    first, again = (measurer.compare(asked, LABELS) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.ttft_ratio > 0 and 0 < one.kv_ratio <= 1.1
        assert vars(one) | {"ttft_ratio": 0} == vars(other) | {"ttft_ratio": 0}
    assert chunk_files(engine.store.path) == before  # type: ignore[attr-defined]

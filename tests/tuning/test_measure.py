"""A question asked of candidates, against slow ways to the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samkv_integrations import METHODS, ChunkStore, Engine
from samkv_integrations.bench.data import Question
from samkv_integrations.bench.fidelity import greedy
from samkv_integrations.bench.question_caches import prompt_ids
from samkv_integrations.tuning.candidates import FULL, Candidate, grid
from samkv_integrations.tuning.measure import Measurer, token_f1
from samkv_integrations.tuning.timed_answer import timed_answer
from tests.support.models import tiny_model
from tests.support.stores import chunk_files

TEXTS = tuple(
    f"[Town {n}]\nThe river of town {n} is called R{n}, and its fair is in May." for n in range(3)
)
QUESTION = Question(
    id="q", dataset="d", kind="d", question="Which river?", answers=(), documents=TEXTS,
    max_new_tokens=6,
)  # fmt: skip
LABELS = (
    "reuse",
    "auto, quest@0.1",
    "auto, first=48, matched=192",
    "reuse, 8 bits",
    "auto, 8 bits",
)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    made = Engine(tiny_model(), ChunkStore(tmp_path / "kv"), block_size=8, prefix_bytes=0)
    made.cache_chunks(TEXTS)
    return made


@pytest.fixture
def candidates(engine: Engine) -> list[Candidate]:
    return [each for each in grid(engine.model.name, 4) if each.label in LABELS]


def clock() -> Iterator[float]:
    """A second passes whenever anybody looks."""
    now = 0.0
    while True:
        now += 1.0
        yield now


def test_an_answer_is_the_engines_own(engine: Engine) -> None:
    for method in ("recompute", "reuse", "samkv-guided"):
        mine = timed_answer(engine, QUESTION.prompt(), TEXTS, METHODS[method], 6)
        theirs = engine.generate(QUESTION.prompt(), TEXTS, method=method, max_new_tokens=6)
        assert mine.text == theirs.text.strip()
        assert mine.report.bytes_read == theirs.report.bytes_read
        logits = engine.logits(QUESTION.prompt(), TEXTS, follow=mine.tokens[:-1], method=method)
        assert torch.equal(logits, mine.logits)


def test_an_answer_has_the_repetition_penalty_of_the_model(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Engine.generate` takes it too. Here it is below 1: six tokens are too few to repeat any."""
    plain = timed_answer(engine, QUESTION.prompt(), TEXTS, METHODS["reuse"], 6)
    monkeypatch.setattr(engine.model.hf.generation_config, "repetition_penalty", 0.1)
    mine = timed_answer(engine, QUESTION.prompt(), TEXTS, METHODS["reuse"], 6)
    theirs = engine.generate(QUESTION.prompt(), TEXTS, method="reuse", max_new_tokens=6)
    assert mine.text == theirs.text.strip() != plain.text
    assert torch.equal(mine.logits[0], plain.logits[0])  # the model's own


def test_rows_say_how_far_candidates_are_from_full_prefill(
    engine: Engine, candidates: list[Candidate], tmp_path: Path
) -> None:
    before = chunk_files(engine.store.path)  # type: ignore[attr-defined]
    times = clock()
    with Measurer(engine, candidates, max_new_tokens=6, clock=lambda: next(times)) as measurer:
        full, *rows = measurer.rows(QUESTION, LABELS)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tune-")]
    assert [row["label"] for row in (full, *rows)] == [FULL, *LABELS]
    own = greedy(engine.model, prompt_ids(engine.model, QUESTION), 6, end_ids=engine.model.eos_ids)
    assert full["tokens"] == len(own)
    for row in rows:
        if row["answer"] == full["answer"]:
            assert row["exact"] == row["f1"] == 1.0
            assert row["answer_loglik"] == full["answer_loglik"] == row["full_answer_loglik"]
        else:
            assert row["exact"] == 0.0
        assert row["first_kl"] >= 0 and row["spent_s"] > 0 and row["full_ttft_s"] == 1.0
    reuse = engine.logits(QUESTION.prompt(), TEXTS, method="reuse")
    truth = engine.logits(QUESTION.prompt(), TEXTS, method="recompute")
    expected = torch.nn.functional.kl_div(
        reuse.double().log_softmax(-1), truth.double().log_softmax(-1), log_target=True,
        reduction="sum",
    )  # fmt: skip
    assert rows[0]["first_kl"] == pytest.approx(float(expected), rel=1e-6)
    assert rows[3]["bytes_read"] > 1.5 * rows[0]["bytes_read"]  # 8 bits and 4
    # the collection's own caches are as they were, and nothing is left beside them
    assert chunk_files(engine.store.path) == before  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_nothing_of_one_question_is_left_for_the_next(
    engine: Engine, candidates: list[Candidate]
) -> None:
    with Measurer(engine, candidates, max_new_tokens=6) as measurer:
        first, again = (list(measurer.rows(QUESTION, LABELS)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        timed = {"ttft_s", "full_ttft_s", "spent_s"}
        assert {k: v for k, v in one.items() if k not in timed} == {
            k: v for k, v in other.items() if k not in timed
        }


def test_f1_is_over_tokens_in_any_order() -> None:
    assert token_f1([1, 2, 3], [3, 2, 1]) == 1.0
    assert token_f1([1, 2], [3]) == 0.0
    assert token_f1([1, 1], [1]) == pytest.approx(2 / 3)
    assert token_f1([], []) == 1.0
    assert token_f1([], [1]) == token_f1([1], []) == 0.0


def test_the_token_that_ends_an_answer_is_no_agreement(
    engine: Engine, candidates: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two empty answers agree, whatever token ends them."""
    methods = ("recompute", "reuse")
    one, other = (timed_answer(engine, QUESTION.prompt(), TEXTS, METHODS[m], 6) for m in methods)
    assert one.tokens[0] != other.tokens[0]
    ends = frozenset({one.tokens[0], other.tokens[0]})
    monkeypatch.setattr(type(engine.model), "end_ids", lambda *_: ends)
    with Measurer(engine, candidates, max_new_tokens=6) as measurer:
        full, row = measurer.rows(QUESTION, ["reuse"])
    assert (full["tokens"], row["tokens"]) == (1, 1)
    assert (row["answer"], row["exact"], row["f1"]) == ("", 1.0, 1.0)

"""A question asked of settings, against slow ways to the same figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.evaluation.measures import exact_match
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.methods import METHODS
from samkv_integrations.tuning.run import FULL, Measurer, candidates
from tests.support.models import tiny_model
from tests.support.stores import chunk_files

TEXTS = tuple(
    f"[Town {n}]\nThe river of town {n} is called R{n}, and its fair is in May." for n in range(3)
)
QUESTION = Question(id="q", question="Which river?", documents=TEXTS, max_new_tokens=6)
METHODS_BY_LABEL = {
    **{label: each.to_method() for label, each in candidates("m", 4).items()},
    "samkv-guided": METHODS["samkv-guided"],
}
LABELS = ("reuse", "auto, quest@0.1", "auto, first=48")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    made = Engine(tiny_model(), ChunkStore(tmp_path / "kv"), block_size=8, prefix_bytes=0)
    made.cache_chunks(TEXTS)
    return made


def measurer(engine: Engine, **options: object) -> Measurer:
    return Measurer(engine, METHODS_BY_LABEL, max_new_tokens=6, **options)  # type: ignore[arg-type]


def test_an_answer_is_the_engines_own(engine: Engine) -> None:
    for method in ("recompute", "reuse", "samkv-guided"):
        mine, report, _ = measurer(engine).answer(QUESTION, method, 6)
        theirs = engine.generate(QUESTION.prompt(), TEXTS, method=method, max_new_tokens=6)
        assert mine.text == theirs.text.strip()
        assert report.bytes_read == theirs.report.bytes_read
        logits = engine.logits(QUESTION.prompt(), TEXTS, follow=mine.tokens[:-1], method=method)
        assert torch.equal(logits, mine.logits)


def test_an_answer_has_the_repetition_penalty_of_the_model(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Engine.generate` takes it too. Here it is below 1: six tokens are too few to repeat any."""
    plain, _, _ = measurer(engine).answer(QUESTION, "reuse", 6)
    monkeypatch.setattr(engine.model.hf.generation_config, "repetition_penalty", 0.1)
    mine, _, _ = measurer(engine).answer(QUESTION, "reuse", 6)
    theirs = engine.generate(QUESTION.prompt(), TEXTS, method="reuse", max_new_tokens=6)
    assert mine.text == theirs.text.strip() != plain.text
    assert torch.equal(mine.logits[0], plain.logits[0])  # the model's own


def test_figures_say_how_far_settings_are_from_full_prefill(engine: Engine) -> None:
    before = chunk_files(engine.store.path)  # type: ignore[attr-defined]
    times = iter(range(1000))  # a second passes whenever anybody looks
    found = measurer(engine, clock=lambda: next(times)).compare(QUESTION, LABELS)
    model = engine.model
    ids = QUESTION.prompt_ids(model)
    made = model.hf.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    full, _, _ = measurer(engine).answer(QUESTION, FULL, 6)
    assert list(full.tokens) == made[0, len(ids) :].tolist()
    for label, each in zip(LABELS, found, strict=True):
        text = measurer(engine).answer(QUESTION, label, 6)[0].text
        assert each.full and each.right == bool(exact_match(text, [full.text]))
        assert each.first_kl >= 0 and each.ttft_ratio == 1.0 and 0 < each.kv_ratio <= 1.1
    reuse = engine.logits(QUESTION.prompt(), TEXTS, method="reuse")
    truth = engine.logits(QUESTION.prompt(), TEXTS, method="recompute")
    expected = torch.nn.functional.kl_div(
        reuse.double().log_softmax(-1), truth.double().log_softmax(-1), log_target=True,
        reduction="sum",
    )  # fmt: skip
    assert found[0].first_kl == pytest.approx(float(expected), rel=1e-6)
    assert chunk_files(engine.store.path) == before  # type: ignore[attr-defined]


def test_gold_answers_judge_full_prefill_too(engine: Engine) -> None:
    """A setting may be right where full prefill is not; without them it can only lose."""
    asked = measurer(engine)
    full, reuse = (asked.answer(QUESTION, m, 6)[0].text for m in (FULL, "reuse"))
    assert not exact_match(reuse, [full])
    for gold, expected in (
        ((reuse,), (True, False)),
        ((full,), (False, True)),
        ((), (False, True)),
    ):
        (found,) = asked.compare(replace(QUESTION, answers=gold), ["reuse"])
        assert (found.right, found.full) == expected, gold

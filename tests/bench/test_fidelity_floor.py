"""The floor of a fidelity run, and caches in several bits: tiny models, own short questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import divergence, fidelity, variants
from benchmarks.datasets import Question
from benchmarks.divergence import Forced
from benchmarks.fidelity import TruthFiles
from benchmarks.journal import Journal
from samkv_integrations.engine.chunk_prefix import DOCUMENTS_BEFORE
from samkv_integrations.figures import Row
from samkv_integrations.model.model import Model
from tests.support.models import tiny_model
from tests.support.records import RECORDS, TEXTS

QUESTIONS = [
    Question(
        id=record.name, dataset="town", kind="town", question=record.question,
        answers=(record.workers,), documents=tuple(TEXTS[at : at + 2]),
    )
    for at, record in enumerate(RECORDS[:2])
]  # fmt: skip


def config(*names: str, bits: tuple[int, ...] = (4,), **options: Any) -> fidelity.FidelityConfig:
    made = variants.at_store_bits(variants.combine(["recompute", *names]), bits)
    asked = {"questions": QUESTIONS, "tokens": 3, "past_end": True, "floor": True, **options}
    return fidelity.FidelityConfig(variants=made, store_bits=bits[0], **asked)


def measured(
    asked: fidelity.FidelityConfig, model: Model, other: Model, folder: Path
) -> fidelity.Result:
    truths = TruthFiles(folder / "truths")
    with Journal(folder, asked.settings(model)) as journal:
        found = fidelity.run(asked, model, journal, truths)
        fidelity.measure_floor(asked, other, journal, truths, found)
    return found


def test_a_model_is_at_no_distance_from_itself(tmp_path: Path) -> None:
    model = tiny_model()
    found = measured(config(), model, model, tmp_path)
    assert [row["label"] for row in found.rows] == ["recompute", "recompute, float32"] * 2
    for row in found.rows:
        assert (row["first_kl"], row["kl"], row["top1"], row["answer_llr"]) == (0, 0, 1, 0)


def test_the_floor_is_that_of_transformers_own_forward(tmp_path: Path) -> None:
    """Weights of another seed stand for another dtype, whose rounding depends on the way."""
    model, other = tiny_model(), tiny_model(seed=1)
    found = measured(config(), model, other, tmp_path)
    for question, row in zip(QUESTIONS, found.rows[1::2], strict=True):
        prompt = question.prompt_ids(model)
        own = fidelity.greedy(model, prompt, 3, never=model.eos_ids)
        with torch.inference_mode():
            rows = [m.hf(torch.tensor([prompt + own[:-1]])).logits[0, -3:] for m in (model, other)]
        expected = divergence.measure(Forced(own=rows[0]), Forced(own=rows[1]))
        # the same sums in another order
        assert row["first_kl"] == pytest.approx(expected["first_kl"], rel=1e-3)
        assert row["kl"] == pytest.approx(expected["kl"], rel=1e-3)
        assert row["top1"] == expected["top1"] and row["kl"] > 1e-4


def test_the_other_dtype_is_near(tmp_path: Path) -> None:
    model, other = tiny_model(), tiny_model(dtype=torch.bfloat16)
    assert (fidelity.other_dtype(model), fidelity.other_dtype(other)) == ("bfloat16", "float32")
    found = measured(config("reuse"), model, other, tmp_path)
    kl = {row["label"]: row["kl"] for row in found.rows[:3]}
    assert list(kl) == ["recompute", "recompute, bfloat16", "reuse"]
    assert 0 < kl["recompute, bfloat16"] < kl["reuse"]
    assert not (tmp_path / "truths").exists()


# a run that stops within a question is in test_fidelity.py, too
@pytest.mark.parametrize("stops_at", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_stopped_run_goes_on_to_the_same_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: int
) -> None:
    """Stopped between two variants, and between two floors."""
    asked, model, other = config("reuse"), tiny_model(), tiny_model(dtype=torch.bfloat16)
    expected = measured(asked, model, other, tmp_path / "undisturbed").rows
    add, left = Journal.add, iter(range(stops_at))

    def add_or_stop(journal: Journal, line: Row) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        add(journal, line)

    monkeypatch.setattr(Journal, "add", add_or_stop)
    with pytest.raises(KeyboardInterrupt):
        measured(asked, model, other, tmp_path / "run")
    monkeypatch.setattr(Journal, "add", add)
    assert measured(asked, model, other, tmp_path / "run").rows == expected
    assert not (tmp_path / "run" / "truths").exists()


def test_truths_come_back_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    truths = TruthFiles(tmp_path / "truths")
    known = Forced(own=torch.randn(3, 5), reference=torch.randn(2, 5), expected=(4, 1))
    truths.keep("known", [1, 2, 3], known)
    truths.keep("../unknown", [1], Forced(own=torch.randn(1, 5)))
    assert truths.has("known") and not truths.has("other")
    own, found = truths.read("known")
    assert (own, found.expected) == ([1, 2, 3], (4, 1)) and found.reference is not None
    assert torch.equal(found.own, known.own) and torch.equal(found.reference, known.reference)  # type: ignore[arg-type]
    assert truths.read("../unknown")[1].reference is None
    assert len(list((tmp_path / "truths").iterdir())) == 2
    truths.discard("known")
    truths.close()
    assert truths.has("../unknown") and not truths.has("known")
    truths.discard("../unknown")
    truths.close()
    assert list(tmp_path.iterdir()) == []


def test_a_first_chunk_in_16_bits_is_full_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law's limit: before it stands what it was prefilled after, and nothing is rounded."""

    def prompt(asked: str, chunks: Sequence[str], chat: bool) -> str:
        return f"{DOCUMENTS_BEFORE}{chunks[0]} {asked}"

    monkeypatch.setattr("samkv_integrations.evaluation.questions.rag_prompt", prompt)
    # 16 letters in a row that the document has too would be taken from its cache
    alone = [replace(q, question="How many?", documents=q.documents[:1]) for q in QUESTIONS]
    asked = config("reuse", bits=(4, 16), questions=alone, floor=False)
    assert list(asked.variants) == ["recompute", "reuse, 4 bits", "reuse, 16 bits"]
    model = tiny_model()
    with Journal(tmp_path, asked.settings(model)) as journal:
        rows = fidelity.run(asked, model, journal).rows
    by_label = {label: [r for r in rows if r["label"] == label] for label in asked.variants}
    assert [row["store_bits"] for row in rows[:3]] == [None, 4, 16]
    assert max(row["kl"] for row in by_label["reuse, 16 bits"]) < 1e-9
    assert min(row["kl"] for row in by_label["reuse, 4 bits"]) > 1e-7
    assert {row["recompute_ratio"] for row in by_label["recompute"]} == {1}
    assert {row["recompute_ratio"] for row in by_label["reuse, 16 bits"]} == {0}


def test_bits_together_are_bits_alone(tmp_path: Path) -> None:
    model, rows = tiny_model(), {}
    for bits in [(4, 8), (4,), (8,)]:
        asked = config("reuse", bits=bits, floor=False, tokens=1)
        with Journal(tmp_path / str(bits), asked.settings(model)) as journal:
            rows[bits] = fidelity.run(asked, model, journal).rows
    together = {(r["id"], r["store_bits"]): r["kl"] for r in rows[4, 8] if r["store_bits"]}
    apart = {(r["id"], r["store_bits"]): r["kl"]
             for bits in [(4,), (8,)] for r in rows[bits] if r["store_bits"]}  # fmt: skip
    assert together == apart and len(set(together.values())) == 4
    assert {row["label"] for row in rows[4,]} == {"recompute", "reuse"}


def test_without_answers_no_figure_of_answers(tmp_path: Path) -> None:
    asked = config("reuse", questions=[replace(q, answers=()) for q in QUESTIONS])
    found = measured(asked, tiny_model(), tiny_model(dtype=torch.bfloat16), tmp_path / "without")
    labelled = measured(config("reuse"), tiny_model(), tiny_model(), tmp_path / "with")
    assert {row["answer_llr"] for row in found.rows} == {None}
    assert [r["kl"] for r in found.rows if r["label"] == "reuse"] == [
        r["kl"] for r in labelled.rows if r["label"] == "reuse"
    ]

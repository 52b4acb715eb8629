"""The fidelity bench: its questions, what it forces, and a run on the built-in model."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import datasets, divergence, fidelity, variants
from benchmarks.journal import ROWS, Journal
from samkv_integrations import METHODS, Engine
from samkv_integrations.errors import EmptyInput, InvalidOption, PromptTooLong, UnknownOption
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.figures import Row
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.text import rag_prompt
from tests.support.covering import covering
from tests.support.models import tiny_model
from tests.support.records import RECORDS, TEXTS, builtin

NAMES = ("recompute", "reuse", "samkv-guided")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    builtin()  # sets it, as the command does


PROMPT = rag_prompt(RECORDS[1].question, TEXTS[:3])


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), block_size=8)
    engine.cache_chunks(TEXTS[:3])
    return engine


def test_logits_of_full_prefill_are_the_model_s(engine: Engine) -> None:
    model, follow = engine.model, [70, 71, 72]
    with engine.resolve(str(PROMPT), TEXTS[:3]) as resolved:
        ids = resolved.token_ids
    found = engine.logits(PROMPT, TEXTS[:3], follow=follow, method="recompute")
    with torch.inference_mode():
        expected = model.hf(torch.tensor([ids + follow])).logits[0, -4:]
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    # the same sums in another order
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("method", "eviction"), covering(list(METHODS), ["none", *EVICTIONS]))
def test_logits_are_those_that_an_answer_is_drawn_from(
    engine: Engine, method: str, eviction: str
) -> None:
    how: dict[str, Any] = {"method": method, "eviction": eviction}
    follow: list[int] = []
    rows = []
    for _ in range(4):
        rows.append(engine.logits(PROMPT, TEXTS[:3], follow=follow, **how)[-1])
        follow.append(int(rows[-1].argmax()))
    together = engine.logits(PROMPT, TEXTS[:3], follow=follow[:-1], **how)
    assert together.shape == (4, engine.model.config.vocab_size)
    # room for more tokens may change how sums are split
    torch.testing.assert_close(together, torch.stack(rows), atol=1e-5, rtol=1e-5)
    text = engine.generate(PROMPT, TEXTS[:3], max_new_tokens=4, repetition_penalty=1.0, **how).text
    ended = [n for n, token in enumerate(follow) if token in engine.model.eos_ids]
    assert text == engine.model.detokenize(follow[: min(ended, default=4)])


def test_logits_need_room_in_the_window(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    n_tokens = engine.count_tokens(str(PROMPT)) + 2
    monkeypatch.setattr(Model, "context_window", n_tokens)
    assert len(engine.logits(PROMPT, TEXTS[:3], follow=[70, 71])) == 3
    with pytest.raises(PromptTooLong):
        engine.logits(PROMPT, TEXTS[:3], follow=[70, 71, 72])


def test_the_forced_answer_is_full_prefill_s() -> None:
    model = builtin()
    engine = Engine(model, method="recompute")
    ids = model.tokenize(str(PROMPT), special=True)
    prompt = [model.bos_id, *ids]
    found = fidelity.greedy(model, prompt, 32, end_ids=model.eos_ids)  # type: ignore[arg-type]
    assert found[-1] in model.eos_ids and len(found) < 32
    assert model.detokenize(found) == engine.generate(PROMPT, ()).text
    assert model.detokenize(found).strip() == RECORDS[1].workers
    assert fidelity.greedy(model, prompt, 2, end_ids=model.eos_ids) == found[:2]  # type: ignore[arg-type]
    beyond = fidelity.greedy(model, prompt, 12, never=model.eos_ids)  # type: ignore[arg-type]
    assert beyond[: len(found) - 1] == found[:-1]
    assert len(beyond) == 12 and not set(beyond) & model.eos_ids


def test_the_halves_are_fixed_and_even() -> None:
    parts = {part: fidelity.questions(part) for part in ("choose", "report", "all")}  # type: ignore[arg-type]
    ids = {part: [q.id for q in found] for part, found in parts.items()}
    assert sorted(ids["choose"] + ids["report"]) == sorted(ids["all"])
    assert len(ids["all"]) == len(set(ids["all"])) == 240
    for part in ("choose", "report"):
        assert Counter(q.dataset for q in parts[part][:30]) == dict.fromkeys(
            ("hotpotqa", "2wikimqa", "musique"), 10
        )
        assert len(ids[part]) == 120
    digit = hashlib.sha256(ids["report"][0].encode()).hexdigest()[0]
    assert digit in "13579bdf"
    assert fidelity.part_of(ids["report"][0]) == "report"
    with pytest.raises(UnknownOption, match="unknown part 'test'; known: "):
        fidelity.questions("test")  # type: ignore[arg-type]


def test_questions_are_asked_as_on_the_command_line() -> None:
    for question in fidelity.questions("all"):
        assert len(question.documents) == 10 and question.supporting
        assert question.prompt() == rag_prompt(question.question, question.documents)
        assert all(document.startswith("[") for document in question.documents)


def test_fewer_documents_keep_what_the_answer_takes() -> None:
    question = datasets.Question(
        id="q", dataset="d", kind="d", question="?", answers=("a",), documents=tuple("abcdef"),
        supporting=(4, 2),
    )  # fmt: skip
    for n, documents, supporting in [
        (9, "abcdef", (4, 2)),
        (4, "abce", (3, 2)),
        (2, "ce", (1, 0)),
        (1, "e", (0,)),
    ]:
        found = fidelity.with_fewer(question, n)
        assert (found.documents, found.supporting) == (tuple(documents), supporting)
    with pytest.raises(InvalidOption, match="documents=0"):
        fidelity.questions("all", 0)


def config(*names: str, n: int = 2, **options: Any) -> fidelity.FidelityConfig:
    return fidelity.FidelityConfig(
        questions=fidelity.questions("report", 3)[:n],
        variants=variants.combine(names or NAMES),
        **options,
    )


SHORT = [
    datasets.Question(
        id=record.name, dataset="town", kind="town", question=record.question,
        answers=(record.workers,), documents=(record.text,),
    )
    for record in RECORDS[:2]
]  # fmt: skip


def measured(
    config: fidelity.FidelityConfig, folder: Path, model: Model | None = None
) -> fidelity.Result:
    """model: the built-in one if None."""
    model = builtin() if model is None else model
    with Journal(folder, config.settings(model)) as journal:
        return fidelity.run(config, model, journal)


def test_rows_of_a_run(tmp_path: Path) -> None:
    asked = config(past_end=True, tokens=6, n=1)
    found = measured(asked, tmp_path / "run")
    assert [(r["id"], r["label"]) for r in found.rows] == [
        (q.id, label) for q in asked.questions for label in NAMES
    ]
    assert {r["tokens"] for r in found.rows} == {6}
    for line in found.rows:
        figures = {name: line[name] for name in divergence.MEASURES}
        if line["label"] == "recompute":
            assert figures == {"first_kl": 0, "first_top1": 1, "kl": 0, "top1": 1, "answer_llr": 0}
        else:
            assert figures["first_kl"] > 0 and figures["kl"] > 0 and figures["answer_llr"]
    question, line = asked.questions[0], found.rows[1]  # the same by hand
    model = builtin()
    engine = Engine(model, block_size=16)
    engine.cache_chunks(question.documents)
    rows = [engine.logits(question.prompt(), question.documents, method=m) for m in NAMES[:2]]
    # block size changes nothing for reuse; bfloat16 in one batch or another a little
    assert line["first_kl"] == pytest.approx(float(divergence.kl(*rows)), rel=0.05)


def test_a_stopped_run_goes_on_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between questions, and within one, whose full prefill is then computed again."""
    model, asked = tiny_model(), replace(config("recompute", "reuse", tokens=3), questions=SHORT)
    expected = measured(asked, tmp_path / "undisturbed", model).rows
    add = Journal.add
    for n_rows in (1, 2):
        left = iter(range(n_rows))

        def add_or_stop(journal: Journal, line: Row) -> None:
            if next(left, None) is None:  # noqa: B023
                raise KeyboardInterrupt
            add(journal, line)

        monkeypatch.setattr(Journal, "add", add_or_stop)
        with pytest.raises(KeyboardInterrupt):
            measured(asked, tmp_path / "run", model)
    monkeypatch.setattr(Journal, "add", add)
    assert (tmp_path / "run" / ROWS).read_text("utf-8").count("\n") == 3
    assert measured(asked, tmp_path / "run", model).rows == expected
    with pytest.raises(InvalidOption, match="holds a run of another tokens"):
        measured(replace(asked, tokens=4), tmp_path / "run", model)


def test_what_the_window_does_not_hold_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config("recompute", tokens=20)  # longer than the expected answers
    lengths = [len(q.prompt_ids(builtin())) for q in asked.questions]
    assert lengths[0] != lengths[1]
    monkeypatch.setattr(Model, "context_window", max(lengths) + 20)
    assert measured(asked, tmp_path / "all").too_long == 0
    monkeypatch.setattr(Model, "context_window", max(lengths) + 19)
    found = measured(asked, tmp_path / "one")
    assert (found.too_long, len(found.rows)) == (1, 1)
    monkeypatch.setattr(Model, "context_window", min(lengths))
    with pytest.raises(EmptyInput, match="all 2 are too long.*allow fewer documents"):
        measured(asked, tmp_path / "none")


def test_full_prefill_is_always_a_variant() -> None:
    with pytest.raises(InvalidOption, match="distances from 'recompute'"):
        config("reuse")

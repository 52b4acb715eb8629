"""Cells are shared, reserved and given back: none is lost, and kept sequences make room."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest

from samkv_integrations import Engine
from samkv_integrations.errors import OutOfMemory
from samkv_integrations.options import AnswerSettings
from samkv_integrations.runtimes.base import Begun, Observer, PromptPass
from samkv_integrations.runtimes.llama_cpp.cells import Cells, Entries
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.serving.answers import Abandoned
from samkv_integrations.serving.first_token import first_token
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from tests.contracts.runtime_contract import TEXTS
from tests.support.llama_cpp import tiny, with_llama_cpp

pytestmark = with_llama_cpp

PROMPT = "\n\n".join((*TEXTS, "Question: Who laid the line?\nAnswer:"))
"""Of some 250 tokens: a tiny model has a token for each byte, or nearly."""


@pytest.fixture
def model() -> LlamaCppModel:
    return tiny("llama", n_ctx=1024)


def cells_of(model: LlamaCppModel) -> Cells:
    return model.cells


def used(model: LlamaCppModel) -> int:
    """Cells that sequences have, after a collection."""
    gc.collect()
    cells = cells_of(model)
    with cells.lock:
        cells.reserve(0).close()
    return model.context.n_cells - cells.n_free


def test_an_answer_that_is_not_kept_gives_its_cells_back(model: LlamaCppModel) -> None:
    engine = Engine(model, prefix_bytes=0, prefix="none")
    engine.cache_chunks(TEXTS)
    before = used(model)
    for method in ("recompute", "reuse", "samkv-guided"):
        engine.generate(PROMPT, method=method, max_new_tokens=8)
        assert used(model) == before


def test_kept_sequences_take_cells_until_they_are_dropped(model: LlamaCppModel) -> None:
    engine = Engine(model, method="recompute", prefix="none")
    answer = engine.generate(PROMPT, max_new_tokens=8)
    assert used(model) >= answer.report.prompt_tokens
    engine.sequences.clear()
    assert used(model) == 0


def test_an_old_conversation_makes_room_and_is_computed_again(model: LlamaCppModel) -> None:
    engine = Engine(model, method="recompute", prefix="none")
    first = engine.generate(PROMPT, max_new_tokens=8)
    assert engine.generate(PROMPT + first.text, max_new_tokens=1).report.prefix_tokens > 0
    for number in range(5):  # each as long as the first one
        engine.generate(f"{number} {PROMPT}", max_new_tokens=8)
    again = engine.generate(PROMPT, max_new_tokens=8)
    assert (again.report.prefix_tokens, again.text) == (0, first.text)


def test_a_conversation_that_is_lost_at_the_last_moment_is_computed(
    model: LlamaCppModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an answer of another engine, in another thread."""
    engine = Engine(model, method="recompute", prefix="none")
    first = engine.generate(PROMPT, max_new_tokens=8)
    begin, n_calls = model.begin, 0

    def begin_late(work: PromptPass, observer: Observer) -> Begun:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            assert work.held.entries is not None
            model.cells.drop(cast("Entries", work.held.entries))
        return begin(work, observer)

    monkeypatch.setattr(model, "begin", begin_late)
    again = engine.generate(PROMPT, max_new_tokens=8)
    assert (again.text, again.report.prefix_tokens, n_calls) == (first.text, 0, 2)


def test_more_sequences_than_there_are(model: LlamaCppModel) -> None:
    engine = Engine(model, method="recompute", prefix="none")
    for number in range(80):
        assert engine.generate(f"{number}: a tiny prompt", max_new_tokens=2).report.stays
    assert used(model) <= model.context.n_cells


def test_engines_of_one_model_share_its_cells(model: LlamaCppModel) -> None:
    engines = [Engine(model, method="recompute", prefix="none") for _ in range(3)]
    expected = Engine(tiny("llama"), method="recompute", prefix="none")
    prompts = [f"{number} {PROMPT}" for number in range(3)]
    texts = [expected.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            found = pool.map(lambda e, p: e.generate(p, max_new_tokens=8).text, engines, prompts)
        assert [*found] == texts


def test_forty_clients_on_few_cells(model: LlamaCppModel) -> None:
    scheduler = Scheduler(model, Limits(max_batch=16))
    engine = Engine(model, method="reuse", scheduler=scheduler, prefix="none")
    engine.cache_chunks(TEXTS)
    alone = Engine(tiny("llama"), method="reuse", prefix_bytes=0, prefix="none")
    alone.cache_chunks(TEXTS)
    prompts = [f"{TEXTS[n % 3]}\n\nQuestion {n}: what?" for n in range(40)]
    with ThreadPoolExecutor(40) as pool:
        found = [*pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=12).text, prompts)]
    expected = [alone.generate(prompt, max_new_tokens=12).text for prompt in prompts]
    n_same = sum(one == other for one, other in zip(found, expected, strict=True))
    assert n_same >= 38  # of tokens that are nearly as likely, rounding may choose another one
    engine.sequences.clear()
    assert used(model) <= len(engine.prefix)


def test_answers_wait_for_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decode, batches = tiny("llama", n_ctx=32768), LlamaCppModel.decode, list[int]()

    def counted(self: LlamaCppModel, sequences: Any, tokens: Any) -> Any:  # noqa: ANN401
        batches.append(len(sequences))
        return decode(self, sequences, tokens)

    monkeypatch.setattr(LlamaCppModel, "decode", counted)
    scheduler = Scheduler(model, Limits(max_batch=100))
    engine = Engine(model, method="recompute", scheduler=scheduler, prefix="none")
    prompts = [f"Question {number}: what?" for number in range(100)]
    with ThreadPoolExecutor(100) as pool:
        found = pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=200), prompts)
    assert all(answer.report.completion_tokens for answer in found)
    assert max(batches) <= model.context.most_sequences // 2


def test_a_prompt_that_is_abandoned_leaves_no_cells(model: LlamaCppModel) -> None:
    class Leaves(Observer):
        def pause(self) -> None:
            raise Abandoned

    engine = Engine(model, method="samkv-guided", prefix_bytes=0, prefix="none")
    engine.cache_chunks(TEXTS)
    with engine.resolve(PROMPT, TEXTS) as resolved:
        request = engine.request(resolved, AnswerSettings.of(), capacity=8)
        with pytest.raises(Abandoned):
            engine.scheduler.run(lambda _: first_token(request, Leaves()))
    assert used(model) == 0
    assert engine.generate(PROMPT, max_new_tokens=4).report.reused == len(TEXTS)


@pytest.mark.parametrize("n_ctx", [1, 100, 127, 300])
def test_few_cells_are_rounded_up(n_ctx: int) -> None:
    model = tiny("llama", n_ctx=n_ctx)
    assert model.context_window == -(-n_ctx // 256) * 256
    engine = Engine(model, method="recompute", prefix="none")
    assert engine.generate("b" * 130, max_new_tokens=3).report.prompt_tokens >= 130
    engine.calibrate()


def test_running_answers_that_leave_no_cells_are_told(model: LlamaCppModel) -> None:
    engine = Engine(model, method="recompute", prefix_bytes=0, prefix="none")
    with engine.resolve(PROMPT) as resolved:
        request = engine.request(resolved, AnswerSettings.of(), capacity=700)
        first = engine.scheduler.run(lambda _: first_token(request, Observer()))
        with closing(first.sequence), pytest.raises(OutOfMemory, match="n_ctx"):
            other = engine.request(resolved, AnswerSettings.of(), capacity=700)
            engine.scheduler.run(lambda _: first_token(other, Observer()))
    assert used(model) == 0

"""`auto`: full prefill where it is faster, prefixes that are held, missed chunks that are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.runtimes.transformers.costs import assumed_costs
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.memory import MemoryStore
from tests.support.costs import ONE_PASS, TOKENS_ONLY
from tests.support.covering import covering
from tests.support.models import tiny_model


def texts(n_chunks: int, n_tokens: int, seed: int = 0) -> list[str]:
    """Chunks of so many tokens of the tiny tokenizer, whose tokens are bytes."""
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghijklm", k=n_tokens)) for _ in range(n_chunks)]


def prompt(chunks: list[str], *, before: int = 8, after: int = 12, question: str = "Q?") -> str:
    return "\n".join(["b" * before, *chunks, "q" * after + question])


def engine_with(costs: CostModel, **options: Any) -> Engine:
    engine = Engine(tiny_model("llama"), MemoryStore(), block_size=8, store_bits=16, **options)
    engine.costs = costs
    return engine


@contextmanager
def counting(model: Model) -> Iterator[list[int]]:
    """Tokens times layers that the model computes meanwhile, as a list of one number."""
    counted, layer = [0], model.layer

    def count(index: int, hidden: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        counted[0] += hidden.shape[0] * hidden.shape[1]
        return layer(index, hidden, *rest, **options)

    model.layer = count  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        del model.layer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cached", "missed", "uncached"),
    [
        *(
            (round(share * n_chunks) * [n_tokens], round((1 - share) * n_chunks) * [n_tokens], n)
            for n_chunks, n_tokens, n, share in covering(
                [1, 4, 16], [32, 96, 200], [20, 400], [0.0, 0.5, 1.0], times=4
            )
        ),
        # missed chunks of several lengths stand one behind the other in a pass, without padding
        *((4 * [400], each, 20) for each in ([400, *[20] * 9], [1000, 10, 10], [300, 200, 100])),
    ],
    ids=str,
)
def test_never_computes_more_than_full_prefill(
    cached: list[int], missed: list[int], uncached: int
) -> None:
    """What the costs promise holds for what is computed, missed chunks included."""
    chunks = [texts(1, n, seed=place)[0] for place, n in enumerate([*cached, *missed])]
    asked = prompt(chunks, before=uncached // 2, after=uncached // 2)
    engine = engine_with(TOKENS_ONLY)
    engine.cache_chunks(chunks[: len(cached)])
    with counting(engine.model) as full:
        engine.generate(asked, chunks, method="recompute", max_new_tokens=1, on_miss="text")
    for _ in range(2):
        with counting(engine.model) as ours:
            report = engine.generate(asked, chunks, max_new_tokens=1).report
        assert ours[0] <= full[0], report


def test_reuses_where_that_computes_less_and_does_full_prefill_where_not() -> None:
    chunks = texts(4, 200)
    engine = engine_with(TOKENS_ONLY, prefix_bytes=0)
    engine.cache_chunks(chunks)
    reused = engine.generate(prompt(chunks), chunks, max_new_tokens=4)
    assert reused.report.ran == "samkv-guided"
    assert reused.report.recompute_ratio == pytest.approx(4 * 8 / reused.report.context_tokens)
    guided = engine.generate(prompt(chunks), chunks, max_new_tokens=4, method="samkv-guided")
    assert reused.text == guided.text
    engine.costs = ONE_PASS
    whole = engine.generate(prompt(chunks), chunks, max_new_tokens=4)
    assert (whole.report.ran, whole.report.recompute_ratio) == ("recompute", 1.0)
    assert whole.report.method == "auto" and whole.report.eviction is None
    expected = engine.generate(prompt(chunks), chunks, max_new_tokens=4, method="recompute")
    assert whole.text == expected.text


def test_measured_costs_are_kept_beside_the_caches_and_found_again(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "kv")
    engine = Engine(tiny_model("llama"), store, block_size=8)
    assert engine.costs == assumed_costs(engine.model)
    measured = engine.calibrate()
    assert measured != assumed_costs(engine.model)
    assert Engine(tiny_model("llama"), store, block_size=8).costs == measured
    assert Engine(tiny_model("qwen2"), store, block_size=8).costs != measured


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layer_s": 1}', "not json", "\x00"])
def test_broken_costs_are_as_good_as_none(tmp_path: Path, text: str) -> None:
    store = ChunkStore(tmp_path / "kv")
    engine = Engine(tiny_model("llama"), store, block_size=8)
    engine.calibrate()
    (file,) = store.path.glob("costs-*.json")
    file.write_text(text)
    again = Engine(tiny_model("llama"), store, block_size=8)
    assert again.costs == assumed_costs(again.model)


@pytest.mark.parametrize("cached", [True, False])
def test_the_next_question_about_the_same_documents_goes_on_exactly(cached: bool) -> None:
    chunks = texts(3, 60)
    engine = engine_with(ONE_PASS)
    if cached:
        engine.cache_chunks(chunks)
    engine.generate(prompt(chunks), chunks, max_new_tokens=2)
    other = prompt(chunks, question="Something else?")
    with counting(engine.model) as ours:
        answer = engine.generate(other, chunks, max_new_tokens=1)
    assert answer.report.ran == "prefix" and answer.report.recompute_ratio == 0.0
    assert answer.report.prefix_tokens >= 180
    length = answer.report.prompt_tokens - answer.report.prefix_tokens
    assert ours[0] == length * engine.model.n_layers
    expected = engine.logits(other, chunks, method="recompute", eviction="none")
    found = engine.logits(other, chunks, method="auto")
    # two ways of adding the same numbers in float32
    assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))


def test_full_prefill_reads_no_entry_of_few_bits() -> None:
    """Not even of a chunk that stands where it was cached, right behind BOS."""
    chunks = texts(2, 60)
    engine = Engine(tiny_model("llama"), MemoryStore(), block_size=8, store_bits=4, prefix_bytes=0)
    engine.costs = ONE_PASS
    engine.cache_chunks(chunks)
    asked = "\n".join([*chunks, "Q?"])
    found = engine.logits(asked, chunks, method="auto")
    assert torch.equal(found, engine.logits(asked, chunks, method="recompute", eviction="none"))


def ids_of(engine: Engine, asked: str, chunks: list[str]) -> list[int]:
    with engine.resolve(asked, chunks) as resolved:
        return resolved.token_ids


@pytest.mark.parametrize(
    "change", ["order", "one document less", "the text before", "another document"]
)
def test_of_another_beginning_what_agrees_is_taken(change: str) -> None:
    chunks = texts(3, 60)
    engine = engine_with(ONE_PASS)
    engine.generate(prompt(chunks), chunks, max_new_tokens=1)
    earlier = ids_of(engine, prompt(chunks), chunks)
    before = 8
    if change == "order":
        chunks = chunks[::-1]
    elif change == "one document less":
        chunks = chunks[:2]
    elif change == "the text before":
        before = 9
    else:
        chunks = [*chunks[:2], texts(1, 60, seed=7)[0]]
    other = prompt(chunks, before=before)
    agree = 0
    for mine, theirs in zip(ids_of(engine, other, chunks), earlier, strict=False):
        if mine != theirs:
            break
        agree += 1
    report = engine.generate(other, chunks, max_new_tokens=1).report
    assert (report.ran, report.prefix_tokens) == ("prefix", agree)
    expected = engine.logits(other, chunks, method="recompute", eviction="none")
    found = engine.logits(other, chunks, method="auto")
    assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_an_eviction_sees_what_it_wants_whatever_was_asked_before(eviction: str) -> None:
    """A rule that goes by the prompt's queries would see those of the end alone."""
    chunks, other = texts(3, 60), "Something else?"
    cold, warm = engine_with(ONE_PASS, prefix_bytes=0), engine_with(ONE_PASS)
    warm.generate(prompt(chunks), chunks, max_new_tokens=1)
    asked = {"eviction": eviction, "follow": [9, 8, 7]}
    expected = cold.logits(prompt(chunks, question=other), chunks, **asked)
    found = warm.logits(prompt(chunks, question=other), chunks, **asked)
    assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))
    report = warm.generate(prompt(chunks), chunks, eviction=eviction, max_new_tokens=1).report
    ran = "recompute" if eviction == "h2o" else "prefix"  # it wants the queries of all tokens
    assert (report.ran, report.eviction) == (ran, eviction)


@pytest.mark.parametrize("method", ["samkv-guided", "reuse", "epic", "samkv-fusion"])
def test_missed_chunks_are_computed_once_and_answer_as_if_they_had_been_ingested(
    method: str,
) -> None:
    chunks = texts(4, 90)
    warm = engine_with(TOKENS_ONLY)
    warm.cache_chunks(chunks)
    expected = warm.generate(prompt(chunks), chunks, method=method, max_new_tokens=6)
    engine = engine_with(TOKENS_ONLY, prefix_bytes=0)
    engine.cache_chunks(chunks[:1])
    first = engine.generate(prompt(chunks), chunks, method=method, max_new_tokens=6)
    second = engine.generate(prompt(chunks), chunks, method=method, max_new_tokens=6)
    assert first.text == second.text == expected.text
    report = first.report
    assert (report.reused, report.chunk_misses) == (1, {"absent": 3})
    assert report.computed_now == 3 and report.recompute_ratio >= 0.75
    assert (second.report.reused, second.report.chunk_misses) == (4, {})
    assert second.report.computed_now == 0


def test_a_missed_chunk_that_stands_twice_in_a_prompt_is_computed_once() -> None:
    (chunk,) = texts(1, 90)
    engine = engine_with(TOKENS_ONLY)
    engine.cache_chunks(texts(1, 40, seed=1))  # the model has the entries of the prefix
    asked = prompt([chunk, chunk])
    with counting(engine.model) as ours:
        report = engine.generate(asked, [chunk], method="reuse", max_new_tokens=1).report
    assert report.computed_now == 2 and report.reused == 0
    n_rest = report.prompt_tokens - 180
    assert ours[0] == (90 + n_rest) * engine.model.n_layers


def test_full_prefill_computes_no_chunk_apart() -> None:
    """A baseline that also paid for filling the store would flatter what it is compared with."""
    chunks = texts(2, 90)
    engine = engine_with(TOKENS_ONLY)
    with counting(engine.model) as ours:
        report = engine.generate(
            prompt(chunks), chunks, method="recompute", max_new_tokens=1
        ).report
    assert report.computed_now == 0 and not engine.is_cached(chunks[0])
    assert ours[0] == report.prompt_tokens * engine.model.n_layers


def test_auto_leaves_an_empty_store_to_full_prefill() -> None:
    chunks = texts(4, 90)
    engine = engine_with(TOKENS_ONLY, prefix_bytes=0)
    report = engine.generate(prompt(chunks), chunks, max_new_tokens=1).report
    assert (report.ran, report.computed_now) == ("recompute", 0)
    assert not any(engine.is_cached(chunk) for chunk in chunks)

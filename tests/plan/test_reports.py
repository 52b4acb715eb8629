"""What a report says of a prompt's chunks: found, reused, computed now, kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import Engine
from samkv_integrations.report import Report, Reports
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.laws import WHOLE_IS_FASTER
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.served import PROMPT, TEXTS, engine_on


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(tmp_path)


def asked(engine: Engine, **options: Any) -> Report:
    return engine.generate(PROMPT, TEXTS, **{"max_new_tokens": 1, **options}).report


def chunks_of(report: Report) -> tuple[int, int, int]:
    return report.found, report.reused, report.computed_now


@pytest.mark.parametrize("method", ["recompute", "auto"])
def test_full_prefill_reuses_nothing(engine: Engine, method: str) -> None:
    """Regression: chunks were hits although everything was computed."""
    engine.costs = WHOLE_IS_FASTER
    report = asked(engine, method=method)
    assert (report.ran, *chunks_of(report)) == ("recompute", 3, 0, 0)
    assert report.chunk_misses == {} and report.recompute_ratio == 1.0


def test_a_chunk_recomputed_to_its_last_token_is_not_reused(engine: Engine) -> None:
    """Regression: a small context that a method computes whole counted as hits."""
    short = "abc de fgh ijk l"
    engine.cache_chunks([short])
    report = engine.generate(f"Hi. {short}\n\nQ?", [short], method="epic", max_new_tokens=1).report
    assert (report.ran, *chunks_of(report)) == ("epic", 1, 0, 0)
    assert report.recompute_ratio == 1.0


def test_chunks_of_a_prefix_in_memory_are_counted_apart() -> None:
    """Regression: they counted as reused, though the store holds no cache. Nor are they missed."""
    engine = Engine(tiny_model("llama"), block_size=8)
    first = asked(engine, on_miss="text")
    second = asked(engine, on_miss="text")
    assert (first.ran, *chunks_of(first)) == ("recompute", 3, 0, 0)
    assert (second.ran, *chunks_of(second)) == ("prefix", 3, 0, 0)
    assert (first.prefix_chunks, second.prefix_chunks) == (0, 3)
    assert ": 0 of 3 chunks reused, 3 from memory, 269 of 270 prompt tokens" in str(second)
    assert Reports([first, second]).total.prefix_chunks == 3
    assert second.chunk_misses == {} and second.recompute_ratio == 0.0


def test_a_chunk_behind_the_prefix_is_computed_with_the_prompt() -> None:
    engine = Engine(tiny_model("llama"), block_size=8)
    until = PROMPT.index(TEXTS[2])
    engine.generate(PROMPT[:until] + "Q?", TEXTS[:2], max_new_tokens=1, on_miss="text")
    report = asked(engine, on_miss="text")
    assert (report.ran, *chunks_of(report), report.prefix_chunks) == ("prefix", 3, 0, 0, 2)
    assert report.recompute_ratio == len(TEXTS[2]) / sum(map(len, TEXTS))


@pytest.mark.parametrize(("on_miss", "expected"), [("text", (3, 1, 0)), ("compute", (3, 1, 2))])
def test_misses_are_computed_now_or_with_the_prompt(
    engine: Engine, on_miss: str, expected: tuple[int, int, int]
) -> None:
    for text in TEXTS[1:]:
        engine.store.delete(engine.key_of(text))
    report = asked(engine, method="reuse", on_miss=on_miss)
    assert chunks_of(report) == expected
    assert report.chunk_misses == {"absent": 2}
    assert report.recompute_ratio == sum(map(len, TEXTS[1:])) / sum(map(len, TEXTS))


def test_what_an_announcement_computed_is_the_first_prompts_work() -> None:
    """Regression: a query that had just paid for all its chunks reported hits and no work."""
    engine = Engine(tiny_model("llama"), block_size=8, method="reuse", prefix_bytes=0)
    engine.announce(TEXTS, "compute")
    elsewhere = engine.generate("Hello", max_new_tokens=1).report
    assert (*chunks_of(elsewhere), elsewhere.announce_s) == (0, 0, 0, 0.0)
    first, second = asked(engine), asked(engine)
    assert (*chunks_of(first), first.recompute_ratio) == (3, 0, 3, 1.0)
    assert first.announce_s > 0 and first.chunk_misses == {}
    assert (*chunks_of(second), second.recompute_ratio) == (3, 3, 0, 0.0)
    assert second.announce_s == 0


def test_it_is_work_even_where_full_prefill_follows() -> None:
    engine = Engine(tiny_model("llama"), block_size=8)
    engine.costs = WHOLE_IS_FASTER
    engine.announce(TEXTS, "compute")
    report = asked(engine)
    assert (report.ran, *chunks_of(report)) == ("recompute", 3, 0, 3)
    assert report.recompute_ratio == 1.0


def test_prompts_share_an_announcement_by_its_chunks(engine: Engine) -> None:
    for text in TEXTS[:2]:
        engine.store.delete(engine.key_of(text))
    engine.announce(TEXTS, "compute")
    one = engine.generate(f"{TEXTS[0]}\n\nQ?", [TEXTS[0]], max_new_tokens=1).report
    rest = asked(engine, method="reuse")
    assert one.found == one.computed_now == 1
    assert chunks_of(rest) == (3, 2, 1)
    assert one.announce_s == rest.announce_s > 0


@pytest.mark.parametrize("n_layers", [3, 10, 30])
def test_all_of_the_context_is_exactly_one(n_layers: int) -> None:
    """A mean over layers that is added up in parts comes to a little more."""
    hf = hf_model("llama", num_hidden_layers=n_layers)
    engine = Engine(Model(hf, byte_tokenizer(bos=True), "deep"), prefix_bytes=0)
    engine.cache_chunks(TEXTS)
    assert asked(engine, method="reuse").kept_ratio == 1


OTHER = PROMPT.replace("what", "why")


@pytest.mark.parametrize("method", ["reuse", "samkv-guided", "samkv-fusion"])
def test_tokens_before_the_first_chunk_are_counted_apart_from_chunks(
    tmp_path: Path, method: str
) -> None:
    engine = engine_on(tmp_path, prefix_bytes=2**24)
    first = asked(engine, method=method)
    again = engine.generate(OTHER, TEXTS, method=method, max_new_tokens=1).report
    n_before = 1 + PROMPT.index(TEXTS[0])
    assert (first.prefix_tokens, again.prefix_tokens) == (0, n_before)
    assert chunks_of(again) == chunks_of(first) and again.ran == first.ran
    assert again.uncached_tokens == again.prompt_tokens - again.context_tokens - n_before
    reused = (1 - again.recompute_ratio) * again.context_tokens
    assert again.cached_tokens == round(n_before + reused)


@pytest.mark.parametrize("method", ["reuse", "samkv-guided", "auto", "recompute"])
def test_a_follow_up_counts_its_new_tokens_only(tmp_path: Path, method: str) -> None:
    engine = engine_on(tmp_path, prefix_bytes=2**24)
    first = asked(engine, method=method, max_new_tokens=8)
    prompt = PROMPT + "\nQ: and why was that?\nA:"
    report = engine.generate(prompt, TEXTS, method=method, max_new_tokens=1).report
    assert first.stays and report.stays
    assert report.prefix_tokens >= first.prompt_tokens - 1
    n_again = round(report.recompute_ratio * report.context_tokens)
    n_new = len(prompt) + 1 - report.prefix_tokens
    assert report.prompt_tokens - report.cached_tokens == n_new + n_again
    assert 0 < n_again <= 32 if method in ("samkv-guided", "auto") else n_again == 0
    assert (report.found, report.reused, report.prefix_chunks) == (3, 0, 3)
    assert report.bytes_read == 0 and report.kept_ratio == 1.0
    assert (report.exact_tokens == report.context_tokens) == (method == "recompute")


@pytest.mark.parametrize(
    "options", [{"method": "samkv-fusion"}, {"method": "ape"}, {"eviction": "h2o"}]
)
def test_what_cannot_stay_is_said(tmp_path: Path, options: dict[str, str]) -> None:
    engine = engine_on(tmp_path, prefix_bytes=2**24)
    assert not asked(engine, **options).stays
    assert not asked(engine_on(tmp_path), method="reuse").stays, "there is no room"

"""The worked examples of CONTRIBUTING.md run, and keep the laws of what they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from samkv_integrations import Engine
from samkv_integrations.runtimes.transformers.eviction import StreamingLLM
from tests.support.models import tiny_model

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHUNKS = [f"the {name} of number {name} is at the {name}, " * 3 for name in ("mill", "inn", "quay")]
CHUNKS = [chunk.strip() for chunk in CHUNKS]
PROMPT = f"A guide: {' and '.join(CHUNKS)} Where is the inn?"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """What the examples define, each executed as a module of its own."""
    defined: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for number, source in enumerate(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)):
            module = ModuleType(f"example_{number}")
            patch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for hints
            exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
            defined |= vars(module)
        yield SimpleNamespace(**defined)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(tiny_model(), store_bits=16, prefix_bytes=0)
    engine.cache_chunks(CHUNKS)
    return engine


@pytest.mark.parametrize(("last", "other"), [(0, "reuse"), (10_000, "recompute")])
def test_its_limits_are_methods_that_are_known(
    engine: Engine, example: Any, last: int, other: str
) -> None:
    method = replace(example.TAIL, recompute=example.TailRecompute(last=last))
    found = engine.logits(PROMPT, CHUNKS, method=method)
    expected = engine.logits(PROMPT, CHUNKS, method=other)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert not torch.allclose(found, engine.logits(PROMPT, CHUNKS, method=example.TAIL), atol=1e-3)


def test_its_bound_holds(engine: Engine, example: Any) -> None:
    """Estimates take the bound for the share, so it should be as near as it can."""
    report = engine.generate(PROMPT, CHUNKS, method=example.TAIL, max_new_tokens=2).report
    bound = example.TAIL.recompute.most_ratio(report.context_tokens, len(CHUNKS))
    assert report.recompute_ratio == pytest.approx(bound)
    assert example.TAIL.recompute.most_ratio(8, 3) == 1.0


def test_it_recomputes_what_it_says(engine: Engine, example: Any) -> None:
    report = engine.generate(PROMPT, CHUNKS, method=example.TAIL, max_new_tokens=2).report
    assert report.recompute_ratio == 16 * len(CHUNKS) / report.context_tokens
    assert (report.method, report.ran, report.reused) == ("tail", "tail", len(CHUNKS))


def test_what_is_exact_and_what_the_prompt_does_not_hold_is_left_alone(example: Any) -> None:
    engine = Engine(tiny_model(), store_bits=16, prefix="bos")
    engine.cache_chunks(CHUNKS)
    prompt = f"{CHUNKS[0]} and {CHUNKS[1]} and {CHUNKS[2][:40]} Where is the inn?"
    report = engine.generate(prompt, method=example.TAIL, max_new_tokens=2).report
    assert report.reused == 3
    assert round(report.recompute_ratio * report.context_tokens) == 16  # of the second chunk alone


def test_a_method_with_tensors_recomputes_what_was_outlying(engine: Engine, example: Any) -> None:
    report = engine.generate(PROMPT, CHUNKS, method=example.OUTLIERS, max_new_tokens=2).report
    assert (report.ran, report.reused) == ("outliers", len(CHUNKS))
    assert 0 < report.recompute_ratio < 1
    assert not example.OUTLIERS.is_by_tokens and example.TAIL.is_by_tokens


def test_the_eviction_is_streaming_llm_without_sinks(engine: Engine, example: Any) -> None:
    recent, known = (
        engine.generate(PROMPT, CHUNKS, method="reuse", eviction=rule, max_new_tokens=12)
        for rule in (example.Recent(budget_tokens=24), StreamingLLM(budget_tokens=24, sinks=0))
    )
    assert recent.text == known.text
    assert recent.report.decode_kv_bytes == known.report.decode_kv_bytes
    assert recent.report.decode_kv_bytes < recent.report.kv_bytes


def test_the_commands_run_tests_that_exist() -> None:
    commands = re.findall(r"`pytest (tests/[^`]+)`", TEXT)
    assert len(commands) >= 6  # methods of both kinds, evictions, options, listeners, runtimes
    named = {path for command in commands for path in command.split()}
    assert not {path for path in named if not (ROOT / path).exists()}


def test_the_listener_counts_misses(example: Any) -> None:
    engine = Engine(tiny_model())
    engine.listeners.append(example.count_misses)
    engine.generate(PROMPT, CHUNKS, on_miss="text", max_new_tokens=2)
    assert example.misses == {"absent": len(CHUNKS)}


def test_the_runtime_loads_its_model_when_it_is_asked_to(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ModuleType("my_package.model")
    mine.MyRuntime = lambda name, **options: (name, options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    assert example.MINE.load("a", device="cpu") == ("a", {"device": "cpu"})

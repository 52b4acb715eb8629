"""The worked example of CONTRIBUTING.md is a method that keeps the laws of one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from samkv_integrations import Engine
from tests.support.models import tiny_model

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHUNKS = [f"the {name} of number {name} is at the {name}, " * 3 for name in ("mill", "inn", "quay")]
CHUNKS = [chunk.strip() for chunk in CHUNKS]
PROMPT = f"A guide: {' and '.join(CHUNKS)} Where is the inn?"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    module = ModuleType("tail")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tail", module)  # where dataclasses look for their hints
        exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
        yield module


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

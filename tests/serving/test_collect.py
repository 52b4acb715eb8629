"""The reports of all answers of one query, however they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import Engine, Report, Total, collect_reports
from tests.support.served import PROMPT, TEXTS, engine_on
from tests.support.steps import Steps

SHORT = f"{TEXTS[0]}\n\nQ?"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(tmp_path)


def answer(engine: Engine, prompt: str = PROMPT, n: int = 3) -> Report:
    return engine.generate(prompt, max_new_tokens=n, method="reuse").report


def test_reports_are_those_of_the_block_in_order(engine: Engine) -> None:
    answer(engine)
    with collect_reports() as reports:
        assert reports == [] and reports.total.answers == 0
        expected = [answer(engine, SHORT), answer(engine)]
        assert reports == expected
    answer(engine)
    assert reports == expected


def drained(stream: Any) -> None:
    list(stream)


def closed(stream: Any) -> None:
    next(stream)
    stream.close()


def closed_twice(stream: Any) -> None:
    closed(stream)
    stream.close()


@pytest.mark.parametrize("end", [drained, closed, closed_twice])
def test_a_stream_reports_once_when_it_ends(engine: Engine, end: Callable[[Any], None]) -> None:
    with collect_reports() as reports:
        stream = engine.stream(PROMPT, method="recompute", max_new_tokens=3)
    assert reports == []
    end(stream)
    (report,) = reports
    assert report.completion_tokens == (3 if end is drained else 1) and report.found == 3


def test_an_answer_that_fails_reports_how_far_it_came(engine: Engine, steps: Steps) -> None:
    def fail() -> None:
        raise MemoryError

    steps.on_step = fail
    with collect_reports() as reports, pytest.raises(MemoryError):
        answer(engine)
    assert [report.completion_tokens for report in reports] == [1]


def test_tasks_and_their_threads_take_part(engine: Engine) -> None:
    async def ask() -> list[Report]:
        return await asyncio.gather(
            *(asyncio.to_thread(answer, engine, prompt) for prompt in (SHORT, PROMPT))
        )

    with collect_reports() as reports:
        expected = asyncio.run(ask())
    by_size = sorted(reports, key=lambda report: report.prompt_tokens)
    assert by_size == expected


def test_the_total_adds_up_what_can_be_added_up(engine: Engine) -> None:
    with collect_reports() as reports:
        full = engine.generate(SHORT, method="recompute", max_new_tokens=5).report
        engine.store.delete(engine.key_of(TEXTS[1]))
        reuse = engine.generate(PROMPT, TEXTS, method="reuse", max_new_tokens=1).report
    total = reports.total
    assert (total.answers, total.ran) == (2, {"recompute": 1, "reuse": 1})
    assert (total.found, total.reused, total.computed_now) == (4, 2, 1)
    assert total.chunk_misses == {"absent": 1}
    shared = {f.name for f in fields(Total)} & {f.name for f in fields(Report)}
    apart = {"ran", "kept_ratio", "recompute_ratio", "chunk_misses", "decode_tokens_per_s"}
    for name in shared - apart:
        assert getattr(total, name) == getattr(full, name) + getattr(reuse, name), name
    n_full, n_reuse = full.context_tokens, reuse.context_tokens
    assert full.recompute_ratio == 1.0 > reuse.recompute_ratio
    assert total.recompute_ratio == pytest.approx(
        (n_full + reuse.recompute_ratio * n_reuse) / (n_full + n_reuse)
    )
    assert total.kept_ratio == 1.0
    assert total.decode_tokens_per_s == pytest.approx(full.decode_tokens_per_s)
    assert total.decode_s == pytest.approx(4 / full.decode_tokens_per_s)
    assert total.cached_tokens == full.cached_tokens + reuse.cached_tokens > 0
    assert total.to_dict()["chunk_misses"] == {"absent": 1}

"""Listeners: each is told once of every answer, at its end, in the context of whoever asked."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from samkv_integrations import AnswerEnded, Engine
from samkv_integrations.errors import InvalidOption
from tests.support.models import tiny_model
from tests.support.steps import Steps

TEXT = "The mill of Orvik was built in 1871 by two brothers."
PROMPT = f"Read: {TEXT}\nQuestion: when?"
WHO: ContextVar[str] = ContextVar("who", default="nobody")


@pytest.fixture
def heard() -> list[AnswerEnded]:
    return []


@pytest.fixture
def engine(heard: list[AnswerEnded]) -> Iterator[Engine]:
    engine = Engine(tiny_model("llama"), method="reuse", block_size=8)
    engine.listeners.append(heard.append)
    yield engine
    engine.scheduler.run(lambda _: None)


def test_a_complete_answer(engine: Engine, heard: list[AnswerEnded]) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=3)
    (ended,) = heard
    assert (ended.report, ended.finish_reason) == (answer.report, answer.finish_reason)
    assert (ended.model, ended.is_chat, ended.error) == ("tiny-llama", False, None)
    assert ended.settings.sampling.max_new_tokens == 3
    times = [ended.began, *(at for each in ended.stages for at in (each.began, each.ended))]
    assert [*times, ended.ended] == sorted([*times, ended.ended])
    engine.generate([{"role": "user", "content": PROMPT}], max_new_tokens=1)
    assert heard[1].is_chat


def test_an_answer_that_is_closed(engine: Engine, heard: list[AnswerEnded]) -> None:
    with engine.stream(PROMPT, max_new_tokens=3) as stream:
        next(stream)
        assert heard == []
    (ended,) = heard
    assert ended.report is not None and ended.finish_reason is None and ended.error is None


def test_an_answer_that_fails(engine: Engine, heard: list[AnswerEnded], steps: Steps) -> None:
    with pytest.raises(InvalidOption) as before:
        engine.generate(PROMPT, ["a chunk that the prompt does not hold"])
    assert (heard[0].error, heard[0].report) == (before.value, None)

    def fail() -> None:
        raise MemoryError

    steps.on_step = fail
    with pytest.raises(MemoryError) as later:
        engine.generate(PROMPT, max_new_tokens=3)
    assert heard[1].error is later.value
    assert heard[1].report is not None and heard[1].report.completion_tokens == 1


def test_it_is_called_in_the_context_of_whoever_asked(engine: Engine) -> None:
    found: list[str] = []
    engine.listeners.append(lambda ended: found.append(WHO.get()))

    async def ask() -> None:
        WHO.set("a task")
        stream = await engine.astream(PROMPT, max_new_tokens=3)
        WHO.set("somebody later")
        async with stream:
            pass

    asyncio.run(ask())
    engine.generate(PROMPT, max_new_tokens=1)
    assert found == ["a task", "nobody"]


def test_one_that_fails_changes_no_answer(
    engine: Engine, heard: list[AnswerEnded], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ended: AnswerEnded) -> None:
        raise RuntimeError

    before = engine.generate(PROMPT, max_new_tokens=3).text
    engine.listeners.insert(0, fail)
    assert engine.generate(PROMPT, max_new_tokens=3).text == before
    assert len(heard) == 2
    (said,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "fail" in said.getMessage() and said.exc_info


def test_a_dropped_answer_frees_its_cache_and_tells_nobody(
    engine: Engine, heard: list[AnswerEnded]
) -> None:
    """Any lock may be held where an object is collected."""
    threads = set(threading.enumerate())
    stream = engine.stream(PROMPT, max_new_tokens=200)
    next(stream)
    threads |= set(threading.enumerate())
    del stream
    gc.collect()
    assert set(threading.enumerate()) <= threads
    for _ in range(2):  # it is dropped before the next work, or before the one after
        engine.scheduler.run(lambda _: None)
    assert engine.scheduler.load.running == 0 and heard == []


def test_a_wrong_owner(engine: Engine) -> None:
    for wrong in (None, 3, ["key"]):
        with pytest.raises(InvalidOption, match="owner=.*a string"):
            engine.generate(PROMPT, owner=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="owner=.*a string"):
            asyncio.run(engine.agenerate(PROMPT, owner=wrong))  # type: ignore[arg-type]

"""Answers of LangChain's chains are spans below the caller's, however they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel

from langchain_samkv import ChatSamKV, SamKV
from samkv_integrations import Engine
from tests.support.models import tiny_model
from tests.support.telemetry import Told, is_below

TEXT = "Denbury is a town on the river Tume, an hour from Flevport."
ASKED = {"context": TEXT}
PROMPT = ChatPromptTemplate.from_template("{context}\n\nWhich river?")


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(tiny_model(), method="reuse")
    engine.cache_chunks([TEXT])
    return engine


async def read(pieces: Any) -> None:
    async for _ in pieces:
        pass


WAYS: dict[str, tuple[int, Callable[[Runnable[Any, Any]], Any]]] = {
    "invoke": (1, lambda chain: chain.invoke(ASKED)),
    "stream": (1, lambda chain: list(chain.stream(ASKED))),
    "batch": (3, lambda chain: chain.batch([ASKED] * 3)),
    "parallel": (2, lambda chain: RunnableParallel(one=chain, other=chain).invoke(ASKED)),
    "ainvoke": (1, lambda chain: chain.ainvoke(ASKED)),
    "astream": (1, lambda chain: read(chain.astream(ASKED))),
    "abatch": (3, lambda chain: chain.abatch([ASKED] * 3)),
}


@pytest.mark.parametrize("kind", [ChatSamKV, SamKV])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_below_the_caller(engine: Engine, told: Told, way: str, kind: Any) -> None:
    n_answers, ask = WAYS[way]
    chain = PROMPT | kind(engine=engine, max_tokens=2)

    async def awaited() -> None:
        found = ask(chain)
        if asyncio.iscoroutine(found):
            await found

    with told.tracer.start_as_current_span("the caller") as caller:
        asyncio.run(awaited()) if way.startswith("a") else ask(chain)
    assert len(told.answers) == n_answers
    for span in told.answers:
        assert is_below(span, caller)
        assert span.name == ("chat" if kind is ChatSamKV else "text_completion") + " tiny-llama"
        assert span.attributes and span.attributes["samkv.chunk.hits"] == 1
        assert span.attributes["gen_ai.usage.cache_read.input_tokens"] >= len(TEXT)

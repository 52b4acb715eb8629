"""Answers of LlamaIndex's queries are spans below the caller's, however they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.response_synthesizers import Refine, TreeSummarize

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from tests.support.models import tiny_model
from tests.support.telemetry import Told, is_below

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")

TEXTS = ["Denbury is a town on the river Tume.", "Flevport is a town on the river Dane."]


@pytest.fixture(scope="module")
def llm() -> SamKVLLM:
    engine = Engine(tiny_model(), method="reuse")
    engine.cache_chunks(TEXTS)
    return SamKVLLM(engine=engine, max_new_tokens=2)


async def streamed(llm: SamKVLLM) -> None:
    async for _ in await llm.astream_complete(TEXTS[0]):
        pass


async def in_a_thread_of_llama_index(llm: SamKVLLM) -> None:
    TreeSummarize(llm=llm, use_async=True).get_response("Which?", TEXTS)


MESSAGES = [ChatMessage(role="user", content=TEXTS[0])]
WAYS: dict[str, tuple[int, Callable[[SamKVLLM], Any]]] = {
    "complete": (1, lambda llm: llm.complete(TEXTS[0])),
    "stream_chat": (1, lambda llm: list(llm.stream_chat(MESSAGES))),
    "achat": (1, lambda llm: llm.achat(MESSAGES)),
    "astream_complete": (1, streamed),
    "refine": (2, lambda llm: Refine(llm=llm).get_response("Which?", TEXTS)),
    "arefine": (2, lambda llm: Refine(llm=llm).aget_response("Which?", TEXTS)),
    "a thread": (1, in_a_thread_of_llama_index),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_below_the_caller(llm: SamKVLLM, told: Told, way: str) -> None:
    n_answers, ask = WAYS[way]

    async def awaited() -> None:
        await ask(llm)

    with told.tracer.start_as_current_span("the caller") as caller:
        asyncio.run(awaited()) if way.startswith("a") else ask(llm)
    assert len(told.answers) == n_answers
    for span in told.answers:
        assert is_below(span, caller) and span.name == "chat tiny-llama"
        assert span.attributes and span.attributes["samkv.chunk.hits"] >= 1

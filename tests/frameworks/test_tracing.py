"""Answers of chains and queries are spans below the caller's, however they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from llama_index.core import Settings
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockLLM
from llama_index.core.response_synthesizers import Refine, TreeSummarize

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from tests.support.models import tiny_model
from tests.support.telemetry import Told, is_below

TEXTS = ["Denbury is a town on the river Tume.", "Flevport is a town on the river Dane."]
ASKED = {"context": TEXTS[0]}
MESSAGES = [ChatMessage(role="user", content=TEXTS[0])]
PROMPT = ChatPromptTemplate.from_template("{context}\n\nWhich river?")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(tiny_model(), method="reuse", prefix_bytes=0)
    engine.cache_chunks(TEXTS)
    Settings.llm = MockLLM()  # LlamaIndex makes a remote model wherever it was given none
    yield engine
    Settings.llm = None


async def read(pieces: Any) -> None:
    async for _ in pieces:
        pass


async def streamed(llm: SamKVLLM) -> None:
    await read(await llm.astream_complete(TEXTS[0]))


async def in_a_thread_of_llama_index(llm: SamKVLLM) -> None:
    TreeSummarize(llm=llm, use_async=True).get_response("Which?", TEXTS)


OF_LANGCHAIN: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "invoke": (1, lambda chain: chain.invoke(ASKED)),
    "stream": (1, lambda chain: list(chain.stream(ASKED))),
    "batch": (3, lambda chain: chain.batch([ASKED] * 3)),
    "parallel": (2, lambda chain: RunnableParallel(one=chain, other=chain).invoke(ASKED)),
    "ainvoke": (1, lambda chain: chain.ainvoke(ASKED)),
    "astream": (1, lambda chain: read(chain.astream(ASKED))),
    "abatch": (3, lambda chain: chain.abatch([ASKED] * 3)),
}
OF_LLAMA_INDEX: dict[str, tuple[int, Callable[[SamKVLLM], Any]]] = {
    "complete": (1, lambda llm: llm.complete(TEXTS[0])),
    "stream_chat": (1, lambda llm: list(llm.stream_chat(MESSAGES))),
    "achat": (1, lambda llm: llm.achat(MESSAGES)),
    "astream_complete": (1, streamed),
    "refine": (2, lambda llm: Refine(llm=llm).get_response("Which?", TEXTS)),
    "arefine": (2, lambda llm: Refine(llm=llm).aget_response("Which?", TEXTS)),
    "a thread": (1, in_a_thread_of_llama_index),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in (ChatSamKV, SamKV) for way in OF_LANGCHAIN]
    + [(SamKVLLM, way) for way in OF_LLAMA_INDEX],
)
def test_answers_are_below_the_caller(engine: Engine, told: Told, way: str, kind: Any) -> None:
    if kind is SamKVLLM:
        (n_answers, ask), asked = OF_LLAMA_INDEX[way], kind(engine=engine, max_new_tokens=2)
    else:
        (n_answers, ask), asked = OF_LANGCHAIN[way], PROMPT | kind(engine=engine, max_tokens=2)

    async def awaited() -> None:
        await ask(asked)

    with told.tracer.start_as_current_span("the caller") as caller:
        asyncio.run(awaited()) if way.startswith("a") else ask(asked)
    assert len(told.answers) == n_answers
    for span in told.answers:
        assert is_below(span, caller)
        assert span.name == ("text_completion" if kind is SamKV else "chat") + " tiny-llama"
        assert span.attributes and span.attributes["samkv.chunk.hits"] >= 1
        assert span.attributes["gen_ai.usage.cache_read.input_tokens"] >= len(TEXTS[0])

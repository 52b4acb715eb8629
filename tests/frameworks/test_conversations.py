"""A chat that keeps its documents computes its new tokens only, whatever holds its history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from langchain_samkv import ChatSamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine, Report, collect_reports
from samkv_integrations.methods.guided import SEGMENT
from tests.support.records import CHAT_TEMPLATE, RECORDS, TEXTS, builtin
from tests.support.tools import dictated, tool_model

MOST_OTHERS = 16
"""Tokens that a turn may compute beside its new ones."""

FIRST = CHAT_TEMPLATE.format(context_str="\n\n".join(TEXTS[:3]), query_str=RECORDS[1].question)
LATER = [RECORDS[0].question, f"When was {RECORDS[2].name} started?", "And the first one?"]


@pytest.fixture(params=["auto", "reuse", "recompute"])
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = Engine(builtin(), method=request.param, prefix_bytes=2**26)
    engine.cache_chunks(TEXTS[:3])
    return engine


def check(reports: Sequence[Report], *, n_retold: int = 0) -> None:
    """Each turn after the first computes what is new. n_retold: tokens that a template rewrote."""
    assert len(reports) > 1 and reports[0].found == 3
    for before, now in pairwise(reports):
        n_new = now.prompt_tokens - before.prompt_tokens - before.completion_tokens
        n_again = round(now.recompute_ratio * now.context_tokens)
        assert n_again <= (SEGMENT if now.method == "auto" else 0)
        n_computed = now.prompt_tokens - now.cached_tokens - n_again
        assert n_computed <= n_new + n_retold + MOST_OTHERS
        assert now.found >= 3 == now.prefix_chunks and now.stays


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_messages_that_are_appended(engine: Engine, way: str) -> None:
    chat = ChatSamKV(engine=engine, max_tokens=8)
    messages: list[Any] = []
    with collect_reports() as reports:
        for question in [FIRST, *LATER]:
            messages.append(HumanMessage(question))
            if way == "invoke":
                messages.append(chat.invoke(messages))
            else:
                text = "".join(str(piece.content) for piece in chat.stream(messages))
                messages.append(AIMessage(text))
    check(reports)


def test_llama_index_chat_engine(engine: Engine) -> None:
    llm = SamKVLLM(engine=engine, max_new_tokens=8)
    memory = ChatMemoryBuffer.from_defaults(llm=llm, token_limit=3000)
    chat = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    with collect_reports() as reports:
        for question in [FIRST, *LATER]:
            chat.chat(question)
    check(reports)


def retrieved(query: str) -> str:
    """Finds documents."""
    return "\n\n".join(TEXTS[:3])


CALL = '<tool_call>{"name": "retrieved", "arguments": {"query": "town"}}</tool_call>'


def test_an_agent_with_a_tool_that_retrieves() -> None:
    engine = Engine(tool_model(), method="reuse", prefix_bytes=2**28)
    engine.cache_chunks(TEXTS[:3])
    agent = create_agent(ChatSamKV(engine=engine, max_tokens=200), [tool(retrieved)])
    messages: list[Any] = []
    with collect_reports() as reports:
        for answers in ((CALL, "In Flevport."), ("Yes.",), ("In 1901.",)):
            with dictated(*answers):
                asked = {"messages": [*messages, HumanMessage("Where is it, and when?")]}
                messages = agent.invoke(asked)["messages"]
    asking, answering, *_ = reports
    assert asking.found == 0 and answering.reused == 3
    assert answering.prefix_tokens >= asking.prompt_tokens
    check(reports[1:])


def test_a_call_that_was_cut_is_in_the_history_as_it_was_written() -> None:
    """Regression: a stream's brackets stayed around it, and the answer was computed again."""
    chat = ChatSamKV(engine=Engine(tool_model(), prefix_bytes=2**28), max_tokens=200)
    bound, messages = chat.bind_tools([tool(retrieved)]), [HumanMessage("Where is it?")]
    with dictated('{"name": "retrieved", "argu', "Sorry."), collect_reports() as reports:
        first, *rest = bound.stream(messages)
        for piece in rest:
            first += piece
        bound.invoke([*messages, first, HumanMessage("What?")])
    before, now = reports
    assert now.prefix_tokens == before.prompt_tokens + before.completion_tokens


@pytest.fixture
def other() -> Iterator[Engine]:
    engine = Engine(builtin(), method="reuse", prefix_bytes=0)
    engine.cache_chunks(TEXTS[:3])
    yield engine


def test_with_nothing_kept_chunks_are_blended_at_each_turn(other: Engine) -> None:
    chat, messages = ChatSamKV(engine=other, max_tokens=8), list[Any]()
    with collect_reports() as reports:
        for question in [FIRST, *LATER]:
            messages.append(HumanMessage(question))
            messages.append(chat.invoke(messages))
    assert [report.reused for report in reports] == [3] * 4
    assert all(report.prefix_tokens == 0 and not report.stays for report in reports)


def test_the_budget_is_an_argument() -> None:
    for made in (
        ChatSamKV(model="builtin", prefix_bytes="5MB"),
        SamKVLLM(model_name="builtin", prefix_bytes="5MB"),
    ):
        assert made.engine.sequences.max_bytes == 5_000_000

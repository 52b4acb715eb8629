"""What the guide says of agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_core.retrievers import BaseRetriever

from langchain_samkv import ChatSamKV
from tests.support.langchain_chains import IN_SYSTEM, Library, Setting, join
from tests.support.pipelines import TOP_K, questions

N_QUESTIONS = 2


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(library=Library(questions(N_QUESTIONS)), method="samkv-guided")


@pytest.fixture(scope="module")
def question(setting: Setting) -> str:
    return setting.library.questions[0].question


def expected(setting: Setting) -> str:
    (answer, *_) = setting.library.questions[0].answers
    return answer


def agent_of(llm: ChatSamKV, retriever: BaseRetriever) -> Any:
    @dynamic_prompt
    def with_documents(request: ModelRequest) -> str:
        return IN_SYSTEM.format(context=join(retriever.invoke(request.state["messages"][-1].text)))

    return create_agent(llm, tools=[], middleware=[with_documents])


@pytest.mark.parametrize("is_async", [False, True])
def test_an_agent_with_a_dynamic_prompt(setting: Setting, question: str, is_async: bool) -> None:
    agent = agent_of(setting.chat(), setting.retriever())
    given = {"messages": [("human", question)]}
    state = asyncio.run(agent.ainvoke(given)) if is_async else agent.invoke(given)
    *_, reply = state["messages"]
    assert reply.text.strip() == expected(setting)
    report = reply.response_metadata["samkv"]
    assert (report["found"], report["reused"], report["chunk_misses"]) == (TOP_K, TOP_K, {})


def test_an_agent_streams(setting: Setting, question: str) -> None:
    agent = agent_of(setting.chat(), setting.retriever())
    pieces = agent.stream({"messages": [("human", question)]}, stream_mode="messages")
    assert "".join(piece.text for piece, _ in pieces).strip() == expected(setting)

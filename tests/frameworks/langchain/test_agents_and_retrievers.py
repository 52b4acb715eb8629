"""What the guide says of agents, model names, retrievers that combine others, and JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

from langchain_samkv import ChatSamKV
from tests.support.langchain_chains import IN_SYSTEM, TEMPLATE, Library, Setting, join, lcel
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


def test_documents_of_several_retrievers_are_found_once(setting: Setting, question: str) -> None:
    parts = [setting.retriever(), setting.retriever(TOP_K + 2)]
    llm = setting.chat()
    inputs = {
        "context": EnsembleRetriever(retrievers=parts, weights=[0.5, 0.5]) | join,
        "question": lambda asked: asked,
    }
    message = (inputs | ChatPromptTemplate.from_template(TEMPLATE) | llm).invoke(question)
    assert message.text.strip() == expected(setting)
    assert llm.last_report is not None
    assert llm.last_report.found == llm.last_report.reused == TOP_K + 2


@pytest.mark.parametrize(
    "options", [{}, {"indent": 2}, {"ensure_ascii": False}], ids=["plain", "indent", "letters"]
)
def test_contexts_as_json(setting: Setting, question: str, options: dict[str, Any]) -> None:
    def as_json(found: Sequence[Document]) -> str:
        rows = [{"source": each.metadata["title"], "text": each.page_content} for each in found]
        return json.dumps(rows, **options)

    write: Callable[[Sequence[Document]], str] = as_json
    inputs = {"context": setting.retriever() | write, "question": lambda asked: asked}
    llm = setting.chat()
    message = (inputs | ChatPromptTemplate.from_template(TEMPLATE) | llm).invoke(question)
    assert llm.last_report is not None and llm.last_report.reused == TOP_K
    # and it is the answer of a prompt without JSON, for what the model reads of a chunk is the same
    plain = lcel(setting, ChatPromptTemplate.from_template(TEMPLATE), setting.chat())
    assert message.text == plain.invoke(question)

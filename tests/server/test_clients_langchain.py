"""LangChain's ChatOpenAI against a real server: the base URL is all that is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI

from langchain_samkv import OfflineEmbeddings
from tests.support.live_server import (
    ASKED,
    KEY,
    MAX_TOKENS,
    QUESTION,
    LiveServer,
)
from tests.support.records import TEXTS


@pytest.fixture
def llm(live: LiveServer) -> ChatOpenAI:
    return ChatOpenAI(
        model="builtin", base_url=live.url, api_key=KEY, max_tokens=MAX_TOKENS,
        stream_usage=True, max_retries=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(live: LiveServer) -> str:
    return live.answer([{"role": "user", "content": QUESTION}])


def check_reused(message: Any) -> None:
    usage = message.usage_metadata
    assert 0 < usage["input_token_details"]["cache_read"] < usage["input_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_invoke(llm: ChatOpenAI, expected: str) -> None:
    answer = llm.invoke(QUESTION)
    assert answer.text == expected
    assert answer.response_metadata["finish_reason"] == "stop"
    check_reused(answer)


def test_stream(llm: ChatOpenAI, expected: str) -> None:
    first, *others = llm.stream(QUESTION)
    answer = first
    for chunk in others:
        answer += chunk
    assert answer.text == expected
    assert len([chunk for chunk in others if chunk.text]) > 1
    check_reused(answer)


async def test_ainvoke_and_astream(llm: ChatOpenAI, expected: str) -> None:
    answer = await llm.ainvoke(QUESTION)
    assert answer.text == expected
    check_reused(answer)
    assert "".join([chunk.text async for chunk in llm.astream(QUESTION)]) == expected


def test_a_chain_over_a_plain_chroma(llm: ChatOpenAI, live: LiveServer, tmp_path: Path) -> None:
    """The client's own store, whose texts the server has cached."""
    store = Chroma("town", OfflineEmbeddings(), persist_directory=str(tmp_path / "chroma"))
    store.add_texts(TEXTS)
    shown: list[str] = []

    def join(documents: list[Document]) -> str:
        shown.append("\n\n".join(document.page_content for document in documents))
        return shown[-1]

    prompt = ChatPromptTemplate.from_template("Documents:\n\n{context}\n\nQuestion: {question}")
    retriever = store.as_retriever(search_kwargs={"k": len(TEXTS)})
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm
    answer = chain.invoke(ASKED.question)
    content = f"Documents:\n\n{shown[0]}\n\nQuestion: {ASKED.question}"
    assert answer.text == live.answer([{"role": "user", "content": content}])
    assert ASKED.workers in answer.text
    check_reused(answer)


def test_errors_are_those_of_the_client(llm: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        llm.invoke(QUESTION * 20)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        llm.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(
            "Q?"
        )

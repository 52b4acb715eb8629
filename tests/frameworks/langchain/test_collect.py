"""`collect_reports` around LangChain's chains that call the model more than once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_classic.retrievers import MultiQueryRetriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnableParallel

from langchain_samkv import ChatSamKV, SamKVDocumentCompressor, format_docs
from samkv_integrations import Engine, collect_reports
from tests.support.records import RECORDS, TEXTS, builtin

DOCUMENTS = [Document(text) for text in TEXTS[:3]]
PROMPT = ChatPromptTemplate.from_template("Documents:\n\n{context}\n\nQuestion: {question}")
ASKED = [
    {"context": format_docs(DOCUMENTS[:n]), "question": RECORDS[0].question} for n in (1, 2, 3)
]


class Always(BaseRetriever):
    def _get_relevant_documents(self, query: str, **kwargs: Any) -> list[Document]:  # noqa: ANN401
        return DOCUMENTS


@pytest.fixture(scope="module")
def chat() -> ChatSamKV:
    engine = Engine(builtin(), method="reuse")
    engine.cache_chunks(TEXTS[:3])
    return ChatSamKV(engine=engine, max_tokens=2)


def test_branches_run_in_threads_and_tasks(chat: ChatSamKV) -> None:
    parallel = RunnableParallel(one=PROMPT | chat, other=PROMPT | chat)
    with collect_reports() as reports:
        parallel.invoke(ASKED[0])
        assert len(reports) == 2
        asyncio.run(parallel.ainvoke(ASKED[1]))
        assert len(reports) == 4
        asyncio.run((PROMPT | chat).abatch(ASKED))
    assert (len(reports), reports.total.found) == (7, 2 + 4 + 6)


def test_streams_report_when_they_are_read(chat: ChatSamKV) -> None:
    async def read() -> str:
        return "".join([piece.text async for piece in (PROMPT | chat).astream(ASKED[0])])

    with collect_reports() as reports:
        pieces = [piece.text for piece in (PROMPT | chat).stream(ASKED[0])]
        assert asyncio.run(read()) == "".join(pieces)
    assert [report.completion_tokens for report in reports] == [2, 2]


def test_the_calls_of_a_retriever_are_calls_of_the_query(chat: ChatSamKV) -> None:
    retriever = MultiQueryRetriever.from_llm(retriever=Always(), llm=chat)
    chain = {"context": retriever | format_docs, "question": RunnableLambda(str)} | PROMPT | chat
    with collect_reports() as reports:
        chain.invoke(RECORDS[0].question)
    assert [report.found for report in reports] == [0, 3]
    assert chat.last_report == reports[-1]


def test_a_compressor_that_computes_is_work_of_its_query() -> None:
    """Regression: hits and no work, right after they had been computed."""
    chat = ChatSamKV(engine=Engine(builtin(), method="reuse"), max_tokens=2)
    compressor = SamKVDocumentCompressor(llm=chat, on_miss="compute")
    context = Always() | RunnableLambda(compressor.compress_documents) | format_docs
    chain = {"context": context, "question": RunnableLambda(str)} | PROMPT | chat
    for reused, computed in ((0, 3), (3, 0)):
        answer = chain.invoke(RECORDS[0].question)
        figures = answer.response_metadata["samkv"]
        assert (figures["found"], figures["reused"], figures["computed_now"]) == (
            3, reused, computed,
        )  # fmt: skip
        assert (figures["announce_s"] > 0) == bool(computed)

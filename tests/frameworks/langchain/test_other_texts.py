"""Retrievers that prompt with other texts than they search: what is computed once is reused."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_classic.retrievers import MultiVectorRetriever, ParentDocumentRetriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from langchain_samkv import ChatSamKV, OfflineEmbeddings, SamKVDocumentCompressor
from samkv_integrations import Engine
from samkv_integrations.report import Report
from tests.support.langchain_chains import TEMPLATE, join
from tests.support.records import builtin

RECORDS = Path(__file__).parents[3] / "examples" / "town_records"
EMPLOYER, BIRTHPLACE = "Who does Felix Floksen work for?", "Where was Felix Floksen born?"


def documents() -> list[Document]:
    files = sorted(RECORDS.glob("*.txt"))
    return [Document(file.read_text(), metadata={"parent": file.name}) for file in files]


def of_parents() -> BaseRetriever:
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(OfflineEmbeddings()),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=0),
    )
    retriever.add_documents(documents())
    return retriever


def of_summaries() -> BaseRetriever:
    parents = documents()
    retriever = MultiVectorRetriever(
        vectorstore=InMemoryVectorStore(OfflineEmbeddings()),
        docstore=InMemoryStore(),
        id_key="parent",
    )
    first_lines = [Document(d.page_content.split("\n")[0], metadata=d.metadata) for d in parents]
    retriever.vectorstore.add_documents(first_lines)
    retriever.docstore.mset([(d.metadata["parent"], d) for d in parents])
    return retriever


RETRIEVERS = {"ParentDocumentRetriever": of_parents, "MultiVectorRetriever": of_summaries}


@pytest.fixture
def llm() -> ChatSamKV:
    engine = Engine(builtin(), method="samkv-guided", prefix_bytes=0)
    return ChatSamKV(engine=engine, max_tokens=16)


def chain(llm: ChatSamKV, retriever: Runnable) -> Runnable:
    inputs = {"context": retriever | join, "question": RunnablePassthrough()}
    return inputs | ChatPromptTemplate.from_template(TEMPLATE) | llm


def asked(llm: ChatSamKV, answering: Runnable, question: str, answer: str) -> Report:
    assert answering.invoke(question).text.strip() == answer
    assert llm.last_report is not None
    return llm.last_report


@pytest.mark.parametrize("name", RETRIEVERS)
def test_a_parent_is_computed_once_and_reused_by_later_questions(llm: ChatSamKV, name: str) -> None:
    compressor = SamKVDocumentCompressor(llm=llm, on_miss="compute")
    answering = chain(llm, RETRIEVERS[name]() | compressor.compress_documents)
    first = asked(llm, answering, EMPLOYER, "Vasumex Trading")
    assert (first.computed_now, first.reused) == (first.found, 0) != (0, 0)
    assert first.announce_s > 0 and first.chunk_misses == {}
    second = asked(llm, answering, BIRTHPLACE, "Fovwood")
    assert second.reused > 0 and second.reused + second.computed_now == second.found
    again = asked(llm, answering, EMPLOYER, "Vasumex Trading")
    assert (again.found, again.reused, again.computed_now) == (first.found, first.found, 0)

"""Documents before they are indexed and after they were retrieved: cached, announced, shown."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStoreRetriever

from langchain_samkv import (
    OfflineEmbeddings,
    SamKVChroma,
    SamKVDocumentCompressor,
    SamKVDocumentTransformer,
    format_docs,
)
from samkv_integrations import ChunkStore, Engine, Report
from samkv_integrations.errors import ChunkNotCached, HandleError, InvalidChunk, InvalidOption
from tests.support.handles import HANDLE, spelled_out
from tests.support.records import RECORDS, TEXTS, builtin

QUESTION = RECORDS[0].question
PROMPT = PromptTemplate.from_template("Documents:\n\n{context}\n\nQuestion: {question}\nAnswer:")
MODES = ("text", "metadata", "replace")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8, prefix_bytes=0)


def files(engine: Engine) -> set[str]:
    assert isinstance(engine.store, ChunkStore)
    return {file.stem for file in engine.store.path.glob("*/*/*.safetensors")}


def documents(*texts: str) -> list[Document]:
    return [
        Document(id=f"d{n}", page_content=text, metadata={"page": n, "tags": ["x"]})
        for n, text in enumerate(texts)
    ]


def spelled(engine: Engine, documents: Sequence[Document]) -> list[Document]:
    """Copies with texts in place of handles, which differ each time."""
    return [
        Document(
            id=each.id,
            page_content=spelled_out(engine, each.page_content),
            metadata={
                name: spelled_out(engine, value) if isinstance(value, str) else value
                for name, value in each.metadata.items()
            },
        )
        for each in documents
    ]


def retriever_of(found: Sequence[Document], k: int = 2) -> VectorStoreRetriever:
    """The documents in a vector store that knows nothing of caches."""
    store = InMemoryVectorStore(OfflineEmbeddings())
    store.add_documents(list(found))
    return store.as_retriever(search_kwargs={"k": k})


class Answers:
    """The engine at the end of a chain, as `ChatSamKV` is; keeps prompts and reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompts: list[str] = []
        self.reports: list[Report] = []

    def __call__(self, prompt: Any) -> str:
        self.prompts.append(prompt.to_string())
        answer = self.engine.generate(self.prompts[-1], max_new_tokens=8)
        self.reports.append(answer.report)
        return answer.text

    def chain(self, retrieved: Runnable[str, str]) -> Runnable[str, str]:
        inputs = {"context": retrieved, "question": RunnablePassthrough()}
        return inputs | PROMPT | RunnableLambda(self)


class TestTransformer:
    @pytest.mark.parametrize("is_async", [False, True])
    def test_caches_for_any_vector_store(self, engine: Engine, is_async: bool) -> None:
        given = documents(*TEXTS[:4])
        transformer = SamKVDocumentTransformer(engine=engine)
        if is_async:
            cached = asyncio.run(transformer.atransform_documents(given))
        else:
            cached = transformer.transform_documents(given)
        assert list(cached) == documents(*TEXTS[:4])
        assert files(engine) == {engine.key_of(text) for text in TEXTS[:4]}
        answers = Answers(engine)
        answer = answers.chain(retriever_of(cached) | format_docs).invoke(QUESTION)
        assert RECORDS[0].workers in answer
        assert answers.reports[0].found == 2 and not answers.reports[0].chunk_misses


class TestCompressor:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("is_async", [False, True])
    def test_what_becomes_of_documents(self, engine: Engine, mode: Any, is_async: bool) -> None:
        engine.cache_chunks(TEXTS[:1])
        given = documents(TEXTS[0], TEXTS[1], "")  # cached, not cached, nothing to cache
        before = copy.deepcopy(given)
        compressor = SamKVDocumentCompressor(engine=engine, mode=mode)
        if is_async:
            found = asyncio.run(compressor.acompress_documents(given, QUESTION))
        else:
            found = compressor.compress_documents(given, QUESTION)
        assert given == before and files(engine) == {engine.key_of(TEXTS[0])}
        expected = copy.deepcopy(before)
        if mode == "metadata":
            for each, shown in zip(expected, (TEXTS[0], TEXTS[1], ""), strict=True):
                each.metadata["samkv"] = shown
        if mode == "replace":
            expected[0].metadata["samkv_text"] = TEXTS[0]
        for _ in range(2):  # twice is once, but for a new handle
            holds = {"metadata": found[0].metadata.get("samkv"), "replace": found[0].page_content}
            assert mode == "text" or HANDLE.fullmatch(holds[mode])
            assert spelled(engine, found) == expected
            found = compressor.compress_documents(found)

    def test_a_document_without_a_cache_is_a_counted_miss(self, engine: Engine) -> None:
        engine.cache_chunks(TEXTS[:1])
        compressor = SamKVDocumentCompressor(engine=engine)
        answers = Answers(engine)
        retriever = retriever_of(documents(*TEXTS[:2]))
        answers.chain(retriever | format_docs).invoke(QUESTION)
        answers.chain(retriever | compressor.compress_documents | format_docs).invoke(QUESTION)
        silent, counted = answers.reports
        assert (silent.found, silent.chunk_misses) == (1, {})
        assert (counted.found, counted.chunk_misses) == (2, {"absent": 1})

    def test_on_miss(self, engine: Engine) -> None:
        engine.cache_chunks(TEXTS[:1])
        given = documents(*TEXTS[:2], "")
        raises = SamKVDocumentCompressor(engine=engine, on_miss="error")
        assert len(raises.compress_documents(given[::2])) == 2
        with pytest.raises(
            ChunkNotCached, match=r"document 'd1' .*Krasplex.* has no usable cache; index"
        ):
            raises.compress_documents(given)
        assert files(engine) == {engine.key_of(TEXTS[0])}
        computes = SamKVDocumentCompressor(engine=engine, on_miss="compute", mode="replace")
        found = computes.compress_documents(given)
        assert [each.page_content for each in spelled(engine, found)] == [*TEXTS[:2], ""]
        assert all(HANDLE.fullmatch(each.page_content) for each in found[:2])
        again = computes.compress_documents(found)
        assert spelled(engine, again) == spelled(engine, found)
        assert raises.compress_documents(found) == found
        assert files(engine) == {engine.key_of(text) for text in TEXTS[:2]}
        with pytest.raises(InvalidChunk, match="split it"):
            computes.compress_documents(documents("word " * 5000))

    def test_a_stale_handle_is_written_anew(self, engine: Engine) -> None:
        engine.cache_chunks(TEXTS[:1])
        compressor = SamKVDocumentCompressor(engine=engine, mode="metadata")
        (old,) = compressor.compress_documents(documents(TEXTS[0]))
        split = Document(page_content=TEXTS[1], metadata=old.metadata)
        (found,) = compressor.compress_documents([split])
        assert found.metadata["samkv"] == TEXTS[1]
        engine.cache_chunks([TEXTS[1]])
        (found,) = compressor.compress_documents([found])
        assert HANDLE.fullmatch(found.metadata["samkv"])
        assert spelled_out(engine, found.metadata["samkv"]) == TEXTS[1]

    def test_a_text_comes_back_when_its_cache_is_gone(self, engine: Engine) -> None:
        engine.cache_chunks(TEXTS[:1])
        compressor = SamKVDocumentCompressor(engine=engine, mode="replace")
        (shown,) = compressor.compress_documents(documents(TEXTS[0]))
        engine.store.delete(engine.key_of(TEXTS[0]))
        (found,) = compressor.compress_documents([shown])
        assert found.page_content == TEXTS[0]

    def test_copies_share_and_pickles_leave(self, engine: Engine) -> None:
        compressor = SamKVDocumentCompressor(engine=engine, mode="replace")
        transformer = SamKVDocumentTransformer(engine=engine)
        (shown,) = copy.deepcopy(compressor).compress_documents(documents(TEXTS[0]), QUESTION)
        assert not files(engine) and shown.page_content == TEXTS[0]
        copy.deepcopy(transformer).transform_documents(documents(TEXTS[0]))
        assert engine.is_cached(TEXTS[0])
        (shown,) = copy.deepcopy(compressor).compress_documents(documents(TEXTS[0]), QUESTION)
        assert HANDLE.fullmatch(shown.page_content)
        assert spelled_out(engine, shown.page_content) == TEXTS[0]
        sent, there = pickle.loads(pickle.dumps((compressor, transformer)))
        assert sent.mode == "replace"
        for use in (sent.compress_documents, there.transform_documents):
            with pytest.raises(InvalidOption, match="came out of a pickle"):
                use(documents(TEXTS[0]))


@pytest.mark.parametrize("content", [None, 7, b"bytes", ["a", "b"]])
def test_what_is_no_text(engine: Engine, content: Any) -> None:
    given = documents(TEXTS[0], TEXTS[1])
    given[1].page_content = content
    compressor = SamKVDocumentCompressor(engine=engine, mode="replace")
    for use in (
        SamKVDocumentTransformer(engine=engine).transform_documents,
        compressor.compress_documents,
        format_docs,
        partial(format_docs, handles=True),
    ):
        with pytest.raises(InvalidOption, match=r"page_content of document 'd1' .*; it must be"):
            use(given)
    assert not files(engine)


def test_format_docs() -> None:
    given = documents("one", "two")
    given[1].metadata["samkv"] = "[[samkv:...]]"
    assert format_docs(given) == "one\n\ntwo"
    assert format_docs(given, handles=True) == "one\n\n[[samkv:...]]"
    assert format_docs([]) == ""


def test_a_deleted_document_does_not_come_back_by_its_handle(
    engine: Engine, tmp_path: Path
) -> None:
    store = SamKVChroma(
        "deleted", OfflineEmbeddings(), persist_directory=str(tmp_path / "db"), engine=engine
    )
    store.add_texts([TEXTS[0], TEXTS[1]], ids=["a", "b"])
    compressor = SamKVDocumentCompressor(engine=engine, mode="metadata")
    (shown,) = compressor.compress_documents(documents(TEXTS[0]))
    handle = shown.metadata["samkv"]
    assert engine.found_in(handle) == [TEXTS[0]]
    store.delete(["a"])
    with pytest.raises(HandleError, match="has been deleted"):
        engine.generate(f"{handle} {QUESTION}", max_new_tokens=1)
    assert files(engine) == {engine.key_of(TEXTS[1])}

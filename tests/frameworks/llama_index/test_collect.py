"""`collect_reports` around LlamaIndex's queries that call the LLM more than once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.response_synthesizers import TreeSummarize

from llama_index.llms.samkv import SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import Engine, collect_reports
from tests.support.llama_index_corpus import ASKED, TOP_K, Corpus, Lexical
from tests.support.records import RECORDS, TEXTS, builtin

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")


def refining(corpus: Corpus, llm: SamKVLLM, **options: Any) -> Any:
    return corpus.index.as_query_engine(
        llm=llm, similarity_top_k=TOP_K, response_mode="refine", **options
    )


def test_refine_is_a_call_for_every_chunk(corpus: Corpus) -> None:
    llm = corpus.llm(method="reuse")
    with collect_reports() as reports:
        refining(corpus, llm).query(ASKED.question)
    assert len(reports) == TOP_K and llm.last_report == reports[-1]
    assert (reports.total.found, reports.total.reused) == (TOP_K, TOP_K)
    assert reports.total.chunk_misses == {}


def test_in_an_event_loop_and_in_threads_of_llama_index(corpus: Corpus) -> None:
    llm = corpus.llm(method="reuse")
    summarise = TreeSummarize(llm=llm, use_async=True)  # a thread of its own under a running loop

    async def ask() -> tuple[int, int]:
        with collect_reports() as reports:
            await refining(corpus, llm, use_async=True).aquery(ASKED.question)
        with collect_reports() as in_thread:
            summarise.get_response(ASKED.question, [record.text for record in RECORDS[:2]])
        return len(reports), in_thread.total.found

    assert asyncio.run(ask()) == (TOP_K, 2)


def test_a_streamed_answer_is_read_in_the_block(corpus: Corpus) -> None:
    with collect_reports() as reports:
        query_engine = corpus.query_engine(corpus.llm(), streaming=True)
        response = query_engine.query(ASKED.question)
        assert reports == []  # LlamaIndex calls the LLM when somebody begins to read
        assert "".join(response.response_gen).strip() == ASKED.workers
    assert [report.found for report in reports] == [TOP_K]


@pytest.mark.parametrize("at", ["first use", "postprocessor"])
def test_a_cold_query_says_what_it_computed(at: str) -> None:
    """Regression: four hits and no work, right after all four had been computed."""
    engine = Engine(builtin(), method="reuse")
    llm = SamKVLLM(engine=engine, max_new_tokens=2, cache_retrieved=at == "first use")
    announces = [SamKVPostprocessor(llm=llm, on_miss="compute")] if at == "postprocessor" else []
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=Lexical()
    )
    query_engine = index.as_query_engine(
        llm=llm, similarity_top_k=TOP_K, node_postprocessors=announces
    )
    for reused, computed in ((0, TOP_K), (TOP_K, 0)):
        query_engine.query(ASKED.question)
        report = llm.last_report
        assert report is not None
        assert (report.found, report.reused, report.computed_now) == (TOP_K, reused, computed)
        assert (report.announce_s > 0) == bool(computed)
        assert report.recompute_ratio == (1.0 if computed else 0.0)

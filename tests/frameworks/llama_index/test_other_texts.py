"""Windows of sentences and merged parents, which no vector store holds: computed once, reused."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core import SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import BaseQueryEngine, RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, Document

from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.llms.samkv.quickstart import OfflineEmbedding
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import Engine
from samkv_integrations.report import Report
from tests.support.records import builtin

RECORDS = Path(__file__).parents[3] / "examples" / "town_records"
EMPLOYER, BIRTHPLACE = "Who does Felix Floksen work for?", "Where was Felix Floksen born?"


def documents() -> list[Document]:
    """The one that is asked about, and a few others."""
    files = [RECORDS / "felix-floksen.txt", *sorted(RECORDS.glob("*.txt"))[:6]]
    return SimpleDirectoryReader(input_files=files).load_data()


def sentences() -> list[BaseNode]:
    return SentenceWindowNodeParser.from_defaults().get_nodes_from_documents(documents())


def hierarchy() -> list[BaseNode]:
    parser = HierarchicalNodeParser.from_defaults(
        chunk_sizes=[128, 48], chunk_overlap=0, include_metadata=False
    )
    return parser.get_nodes_from_documents(documents())


def of_windows(llm: SamKVLLM, *last: SamKVPostprocessor) -> BaseQueryEngine:
    index = VectorStoreIndex(sentences(), embed_model=OfflineEmbedding())
    return index.as_query_engine(
        llm=llm,
        similarity_top_k=6,
        node_postprocessors=[MetadataReplacementPostProcessor("window"), *last],
    )


def of_parents(llm: SamKVLLM, *last: SamKVPostprocessor) -> BaseQueryEngine:
    nodes = hierarchy()
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents(nodes)
    index = VectorStoreIndex(
        get_leaf_nodes(nodes), storage_context=storage, embed_model=OfflineEmbedding()
    )
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=8), storage)
    return RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=list(last))


ENGINES = {"sentence windows": of_windows, "AutoMergingRetriever": of_parents}


@pytest.fixture
def llm() -> SamKVLLM:
    engine = Engine(builtin(), method="samkv-guided", prefix_bytes=0)
    return SamKVLLM(engine=engine, max_new_tokens=16)


def asked(llm: SamKVLLM, engine: BaseQueryEngine, question: str, answer: str) -> Report:
    assert str(engine.query(question)).strip() == answer
    assert llm.last_report is not None
    return llm.last_report


@pytest.mark.parametrize("name", ENGINES)
def test_a_text_is_computed_once_and_reused_by_later_questions(llm: SamKVLLM, name: str) -> None:
    engine = ENGINES[name](llm, SamKVPostprocessor(llm=llm, on_miss="compute"))
    first = asked(llm, engine, EMPLOYER, "Vasumex Trading")
    assert (first.computed_now, first.reused) == (first.found, 0) != (0, 0)
    assert first.announce_s > 0 and first.chunk_misses == {}
    second = asked(llm, engine, BIRTHPLACE, "Fovwood")
    assert second.reused > 0 and second.reused + second.computed_now == second.found
    again = asked(llm, engine, EMPLOYER, "Vasumex Trading")
    assert (again.found, again.reused, again.computed_now) == (first.found, first.found, 0)


def test_a_parent_is_found_by_its_cached_leaves() -> None:
    """Without the postprocessor, whose caches of parents would hide those of their leaves."""

    def report_of(*, computes: bool) -> Report:
        engine = Engine(builtin(), method="epic", prefix_bytes=0)
        llm = SamKVLLM(engine=engine, max_new_tokens=16)
        SamKVCacheTransform(llm=llm)(get_leaf_nodes(hierarchy()))
        last = [SamKVPostprocessor(llm=llm, on_miss="compute")] if computes else []
        return asked(llm, of_parents(llm, *last), EMPLOYER, "Vasumex Trading")

    by_leaves, by_parents = report_of(computes=False), report_of(computes=True)
    assert by_leaves.computed_now == 0 < by_parents.computed_now
    assert by_leaves.cached_tokens > by_parents.cached_tokens

"""LlamaIndex: its query and chat engines answer from chunk caches, and notice nothing else."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from llama_index.llms.samkv import SamKVCacheTransform
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import KEY_FIELD
from samkv_integrations.errors import InvalidChunk, InvalidOption
from tests.support.handles import HANDLE, spelled_out
from tests.support.llama_index_corpus import ASKED, TOP_K, Corpus
from tests.support.records import RECORDS, TEXTS, builtin
from tests.support.tested_runtime import model_class

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")


def not_called(*arguments: object) -> None:
    raise AssertionError("nothing should have been computed")


class TestQueryEngine:
    def test_sources_are_the_text_that_was_ingested(self, corpus: Corpus) -> None:
        plain = corpus.index.as_retriever(similarity_top_k=TOP_K).retrieve(ASKED.question)
        response = corpus.query_engine(corpus.llm()).query(ASKED.question)
        assert len(response.source_nodes) == TOP_K
        for source, expected in zip(response.source_nodes, plain, strict=True):
            assert source.node.text == source.get_content() == expected.node.text
            assert source.node.text in TEXTS
            assert (source.score, source.node_id) == (expected.score, expected.node_id)
            assert source.node.hash == expected.node.hash
        assert not HANDLE.search(response.get_formatted_sources(length=1000))
        assert not HANDLE.search(repr(response.source_nodes))

    def test_no_handle_is_stored(self, corpus: Corpus) -> None:
        rows = corpus.collection.get(include=["documents", "metadatas"])
        assert sorted(rows["documents"]) == sorted(TEXTS)
        assert "[[samkv" not in repr(rows) and KEY_FIELD not in repr(rows)

    def test_prompt_holds_header_and_handle_alone(self, corpus: Corpus, prompts: list[Any]) -> None:
        corpus.query_engine(corpus.llm(is_chat_model=False)).query(ASKED.question)
        (prompt,) = prompts
        place = RECORDS.index(ASKED)
        assert ASKED.text not in prompt
        assert f"file: {place}.txt\n\n{ASKED.text}" in spelled_out(corpus.engine, prompt)
        assert len(HANDLE.findall(prompt)) == TOP_K
        assert KEY_FIELD not in prompt and "workers" not in prompt


class TestPostprocessor:
    def test_only_prompts_see_the_handle(self, corpus: Corpus) -> None:
        node = TextNode(text=f" {ASKED.text}\n", metadata={"file": "2.txt"})
        before = node.model_copy(deep=True)
        (shown,) = SamKVPostprocessor(engine=corpus.engine, mode="handle").postprocess_nodes(
            [NodeWithScore(node=node, score=0.5)]
        )
        content = shown.node.get_content(MetadataMode.LLM)
        assert ASKED.text not in content
        assert spelled_out(corpus.engine, content) == f"file: 2.txt\n\n{ASKED.text}"
        header, block = shown.node.get_content_blocks(MetadataMode.LLM)
        assert header.text == "file: 2.txt" and HANDLE.fullmatch(block.text)
        assert spelled_out(corpus.engine, block.text) == ASKED.text
        for mode in (MetadataMode.NONE, MetadataMode.ALL, MetadataMode.EMBED):
            assert shown.node.get_content(mode) == node.get_content(mode)
            assert shown.node.get_content_blocks(mode) == node.get_content_blocks(mode)
        assert isinstance(shown.node, TextNode) and shown.score == 0.5
        assert (shown.node_id, shown.node.hash) == (node.node_id, node.hash)
        # what was retrieved is untouched, and shares nothing that can be changed
        assert node == before and type(node) is TextNode
        shown.node.metadata["added"] = "later"
        assert node == before

    def test_follows_the_text_as_it_is(self, corpus: Corpus) -> None:
        (shown,) = SamKVPostprocessor(engine=corpus.engine, mode="handle").postprocess_nodes(
            [NodeWithScore(node=TextNode(text=ASKED.text))]
        )
        shown.node.set_content(TEXTS[0])  # as MetadataReplacementPostProcessor does
        content = shown.node.get_content(MetadataMode.LLM)
        assert HANDLE.fullmatch(content) and spelled_out(corpus.engine, content) == TEXTS[0]
        shown.node.set_content("never cached")
        assert shown.node.get_content(MetadataMode.LLM) == "never cached"

    def test_copies_share_the_engine_and_pickles_leave_it(self, corpus: Corpus) -> None:
        postprocessor = SamKVPostprocessor(engine=corpus.engine, mode="handle")
        nodes = [NodeWithScore(node=TextNode(text=ASKED.text))]
        (shown,) = copy.deepcopy(postprocessor).postprocess_nodes(nodes)
        content = copy.deepcopy(shown).node.get_content(MetadataMode.LLM)
        assert HANDLE.fullmatch(content) and spelled_out(corpus.engine, content) == ASKED.text
        travelled = pickle.loads(pickle.dumps(shown))
        assert travelled.node.get_content(MetadataMode.LLM) == ASKED.text
        with pytest.raises(InvalidOption, match="out of a pickle"):
            pickle.loads(pickle.dumps(postprocessor)).postprocess_nodes(nodes)


class TestCacheTransform:
    def test_leaves_nodes_as_they_are(self, corpus: Corpus) -> None:
        nodes = [TextNode(text=text, metadata={"file": "a.txt"}) for text in TEXTS[:2]]
        before = copy.deepcopy(nodes)
        assert SamKVCacheTransform(llm=corpus.llm())(nodes) is nodes
        assert nodes == before
        assert all(corpus.engine.is_cached(node.text) for node in nodes)

    def test_off_the_event_loop(self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = []
        cache_chunks = Engine.cache_chunks

        def spied(self: Engine, *arguments: Any, **options: Any) -> list[str]:
            threads.append(threading.current_thread())
            return cache_chunks(self, *arguments, **options)

        monkeypatch.setattr(Engine, "cache_chunks", spied)
        asyncio.run(SamKVCacheTransform(engine=corpus.engine).acall([TextNode(text="a b")]))
        assert corpus.engine.is_cached("a b")
        assert threads and threading.main_thread() not in threads

    def test_pipeline_cache_does_not_hide_an_empty_store(self, tmp_path: Path) -> None:
        documents = [Document(text=ASKED.text, doc_id="a")]
        engines = [Engine(builtin(), ChunkStore(tmp_path / name)) for name in ("one", "two")]
        pipeline = IngestionPipeline(transformations=[])
        for engine in engines:
            pipeline.transformations = [SentenceSplitter(), SamKVCacheTransform(engine=engine)]
            (node,) = pipeline.run(documents=documents)
            assert node.metadata == {} and engine.is_cached(ASKED.text)

    def test_pickle_leaves_the_engine(self, corpus: Corpus) -> None:
        transform = SamKVCacheTransform(engine=corpus.engine, show_progress=True)
        pickled = pickle.dumps(transform)
        assert len(pickled) < 10_000
        travelled = pickle.loads(pickled)
        assert travelled.to_dict() == transform.to_dict()
        with pytest.raises(InvalidOption, match="use the one that was pickled"):
            travelled([TextNode(text=ASKED.text)])

    def test_too_long_is_said_before_anything_is_computed(
        self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_class(), "prefill", not_called)
        nodes = [TextNode(text="Never seen."), TextNode(text="salt " * 5000)]
        with pytest.raises(InvalidChunk, match="split it"):
            SamKVCacheTransform(engine=corpus.engine)(nodes)

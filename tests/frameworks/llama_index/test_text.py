"""Pipelines without handles: the LLM finds the texts of cached chunks in ordinary prompts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle, TextNode

from llama_index.llms.samkv import SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import KEY_FIELD
from samkv_integrations.errors import ChunkNotCached, PromptTooLong
from tests.support.llama_index_corpus import ASKED, TOP_K, Corpus, Lexical
from tests.support.records import RECORDS, TEXTS, builtin

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")


def ask(corpus: Corpus, llm: SamKVLLM, *postprocessors: Any) -> Any:
    return corpus.index.as_query_engine(
        llm=llm, similarity_top_k=TOP_K, node_postprocessors=list(postprocessors)
    ).query(ASKED.question)


def drop(corpus: Corpus, text: str) -> None:
    corpus.engine.store.delete(corpus.engine.key_of(text))


@pytest.fixture
def settings() -> Any:
    """LlamaIndex's defaults for a test to change."""
    before = Settings._llm, Settings._embed_model, Settings._transformations
    yield Settings
    Settings._llm, Settings._embed_model, Settings._transformations = before


class TestOnlyTheLlmIsSwapped:
    def test_nothing_is_looked_for_if_so_asked(self, corpus: Corpus) -> None:
        llm = corpus.llm(match_text=False)
        assert ASKED.workers in str(ask(corpus, llm))
        assert (llm.last_report.found, llm.last_report.context_tokens) == (0, 0)

    def test_five_lines_of_llama_index(self, settings: Any, tmp_path: Path) -> None:
        for record in RECORDS:
            (tmp_path / f"{record.name}.txt").write_text(record.text)
        settings.embed_model = Lexical()
        settings.llm = llm = SamKVLLM(
            model_name="builtin", kv_dir=tmp_path / "kv", max_new_tokens=12
        )
        # what follows is as in LlamaIndex's starter tutorial
        from llama_index.core import SimpleDirectoryReader, VectorStoreIndex

        documents = SimpleDirectoryReader(str(tmp_path), required_exts=[".txt"]).load_data()
        index = VectorStoreIndex.from_documents(documents)
        query_engine = index.as_query_engine(
            node_postprocessors=[SamKVPostprocessor(llm=llm, on_miss="compute")]
        )
        for record in RECORDS:
            response = query_engine.query(record.question)
            assert str(response).strip() == record.workers
            report = llm.last_report
            assert (report.found, report.chunk_misses) == (len(response.source_nodes), {})
        # and what was cached at its first use serves an LLM without the postprocessor
        settings.llm = SamKVLLM(model_name="builtin", kv_dir=tmp_path / "kv", max_new_tokens=12)
        index.as_query_engine().query(ASKED.question)
        report = settings.llm.last_report
        assert (report.found, report.chunk_misses) == (2, {})

    def test_others_do_not_learn_what_was_retrieved(self, tmp_path: Path) -> None:
        index = VectorStoreIndex.from_documents(
            [Document(text=text) for text in TEXTS], embed_model=Lexical()
        )
        one, other = (
            SamKVLLM(engine=Engine(builtin(), ChunkStore(tmp_path / name)), max_new_tokens=12)
            for name in ("one", "other")
        )
        last = SamKVPostprocessor(llm=one, on_miss="compute")
        index.as_query_engine(llm=one, node_postprocessors=[last]).query(ASKED.question)
        index.as_query_engine(llm=other).query(ASKED.question)
        assert one.last_report.found == 2 == len(one.engine.store.keys())
        assert other.last_report.found == 0 and other.engine.store.keys() == []
        assert other.last_report.chunk_misses == {}


class TestTextMode:
    def test_the_key_is_hidden_from_prompts(self, corpus: Corpus) -> None:
        # as in records that no pipeline of LlamaIndex has written
        node = TextNode(text=ASKED.text, metadata={KEY_FIELD: "0" * 32, "file": "a.txt"})
        for mode in ("text", "handle"):
            postprocessor = SamKVPostprocessor(engine=corpus.engine, mode=mode)
            (shown,) = postprocessor.postprocess_nodes([NodeWithScore(node=node)])
            content = shown.node.get_content("llm")
            assert KEY_FIELD not in content and content.startswith("file: a.txt\n\n")
            assert shown.node.metadata == {"file": "a.txt"}
        assert node.metadata == {KEY_FIELD: "0" * 32, "file": "a.txt"}  # as it was

    def test_misses(self, own_corpus: Corpus) -> None:
        llm = own_corpus.llm(method="samkv-guided")  # which computes missed chunks as chunks
        for on_miss, misses in (("text", {"absent": 1}), ("compute", {})):
            drop(own_corpus, ASKED.text)
            postprocessor = SamKVPostprocessor(llm=llm, mode="text", on_miss=on_miss)
            assert ASKED.workers in str(ask(own_corpus, llm, postprocessor))
            assert (llm.last_report.found, llm.last_report.chunk_misses) == (TOP_K, misses)
            assert llm.last_report.computed_now == 1
        drop(own_corpus, ASKED.text)
        with pytest.raises(ChunkNotCached, match="SamKVCacheTransform"):
            ask(own_corpus, llm, SamKVPostprocessor(llm=llm, mode="text", on_miss="error"))

    def test_a_node_that_a_later_postprocessor_cut(self, corpus: Corpus) -> None:
        """What is left of it is taken from its cache."""
        llm = corpus.llm()
        ask(corpus, llm, SamKVPostprocessor(llm=llm), _CutFirst())
        cut = llm.last_report
        ask(corpus, llm, SamKVPostprocessor(llm=llm))
        whole = llm.last_report
        assert cut.chunk_misses == whole.chunk_misses == {}
        assert 0 < cut.context_tokens < whole.context_tokens

    def test_nothing_to_announce(self, corpus: Corpus) -> None:
        for mode in ("text", "handle"):
            postprocessor = SamKVPostprocessor(engine=corpus.engine, mode=mode, on_miss="compute")
            assert postprocessor.postprocess_nodes([]) == []
            odd = [TextNode(text=" "), ImageNode(text="a picture"), TextNode(text="")]
            shown = postprocessor.postprocess_nodes([NodeWithScore(node=node) for node in odd])
            assert [node.node.get_content("llm") for node in shown] == [" ", "a picture", ""]


class TestWithoutCaches:
    @pytest.mark.parametrize("mode", ["text", "handle"])
    def test_the_folder_was_removed(self, own_corpus: Corpus, mode: Any) -> None:
        llm = own_corpus.llm()
        postprocessor = SamKVPostprocessor(llm=llm, mode=mode)
        before = str(ask(own_corpus, llm, postprocessor))
        assert (llm.last_report.found, llm.last_report.chunk_misses) == (TOP_K, {})
        shutil.rmtree(own_corpus.folder / "kv")
        assert str(ask(own_corpus, llm, postprocessor)) == before
        assert (llm.last_report.found, llm.last_report.reused) == (TOP_K, 0)
        assert llm.last_report.chunk_misses == {"absent": TOP_K}
        # nor does a question fail because its chunks cannot be cached
        computing = SamKVPostprocessor(llm=llm, mode=mode, on_miss="compute")
        assert str(ask(own_corpus, llm, computing)) == before
        assert llm.last_report.chunk_misses == {"absent": TOP_K}

    def test_the_prompt_does_not_fit(self, corpus: Corpus) -> None:
        llm = corpus.llm(context_window=150)  # for which LlamaIndex packs; the model has more
        with pytest.raises(PromptTooLong, match="context window of 4096 .*retrieve fewer"):
            llm.complete("salt " * 5000)
        # LlamaIndex packs with a tokenizer of its own unless it is told
        with pytest.raises(PromptTooLong, match="Settings.tokenizer = llm.tokenizer_fn"):
            llm.chat([ChatMessage(role="user", content="salt " * 5000)])
        small = corpus.llm(context_window=750)
        ask(corpus, small, SamKVPostprocessor(llm=small))


class _CutFirst(BaseNodePostprocessor):
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        cut = TextNode(text=nodes[0].text[:-10])
        return [NodeWithScore(node=cut), *nodes[1:]]

"""LlamaIndex: its query and chat engines answer from chunk caches, and notice nothing else."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, PromptTemplate, Settings, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ImageBlock
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import LLM, ChatMessage, MessageRole
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    ImageNode,
    MetadataMode,
    NodeWithScore,
    TextNode,
    TransformComponent,
)
from llama_index.vector_stores.chroma import ChromaVectorStore

import samkv_integrations.engine
from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma import KEY_FIELD, HashingEmbedding, open_collection
from samkv_integrations.decode import Decoder
from samkv_integrations.errors import (
    ChunkNotCached,
    HandleError,
    InvalidChunk,
    InvalidOption,
    PromptTooLong,
    UnknownOption,
)
from samkv_integrations.prompt import handle_of
from tests.models import tiny_model
from tests.records import CHAT_TEMPLATE, COMPLETION_TEMPLATE, RECORDS, TEXTS, builtin

HANDLE = re.compile(r"\[\[samkv:[0-9a-f]{32}\]\]")
TOP_K = 4
ASKED = RECORDS[2]


class Lexical(BaseEmbedding):
    """The offline embedding as LlamaIndex wants one."""

    _hashing: HashingEmbedding = PrivateAttr(default_factory=HashingEmbedding)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._hashing.embed([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The records, ingested into a folder."""

    folder: Path
    engine: Engine
    index: VectorStoreIndex
    collection: Any

    def llm(self, **options: Any) -> SamKVLLM:
        return SamKVLLM(engine=self.engine, max_new_tokens=12, **options)

    def query_engine(
        self, llm: SamKVLLM, *, postprocessor: SamKVPostprocessor | None = None, **options: Any
    ) -> Any:
        template = CHAT_TEMPLATE if llm.is_chat_model else COMPLETION_TEMPLATE
        return self.index.as_query_engine(
            llm=llm,
            similarity_top_k=TOP_K,
            node_postprocessors=[postprocessor or SamKVPostprocessor(llm=llm)],
            text_qa_template=PromptTemplate(template),
            **options,
        )

    def key_file(self, text: str) -> Path:
        (file,) = self.folder.glob(f"kv/*/*/{self.engine.key_of(text)}.safetensors")
        return file


def ingest(folder: Path) -> Corpus:
    """The records as a user would ingest them; ``folder`` may hold them already."""
    engine = Engine(builtin(), ChunkStore(folder / "kv"))
    collection = open_collection(folder / "chroma", "town", create=True)
    store = ChromaVectorStore(chroma_collection=collection)
    documents = [
        Document(text=record.text, doc_id=record.name, metadata={"file": f"{place}.txt"})
        for place, record in enumerate(RECORDS)
    ]
    for document in documents:
        document.excluded_embed_metadata_keys.append("file")
    index = VectorStoreIndex.from_documents(
        documents,
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SentenceSplitter(chunk_size=256), SamKVCacheTransform(engine=engine)],
        embed_model=Lexical(),
    )
    return Corpus(folder=folder, engine=engine, index=index, collection=collection)


@pytest.fixture(scope="module", autouse=True)
def no_other_model() -> Iterator[None]:
    """LlamaIndex makes a remote model wherever it was given none: none of that here."""
    Settings.llm = MockLLM()
    yield
    Settings.llm = None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """For tests that only read it."""
    return ingest(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def own_corpus(tmp_path: Path) -> Corpus:
    """For tests that break it."""
    return ingest(tmp_path)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every prompt that an engine is given."""
    seen: list[Any] = []
    stream = Engine.stream

    def spied(self: Engine, prompt: Any, *rest: Any, **options: Any) -> Any:
        seen.append(prompt)
        return stream(self, prompt, *rest, **options)

    monkeypatch.setattr(Engine, "stream", spied)
    return seen


class LlmEvents(BaseCallbackHandler):
    """Payloads of the events of LLM calls."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.started: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def on_event_start(self, event_type: Any, payload: Any = None, **rest: Any) -> str:
        if event_type == CBEventType.LLM:
            self.started.append(payload)
        return rest.get("event_id", "")

    def on_event_end(self, event_type: Any, payload: Any = None, **rest: Any) -> None:
        if event_type == CBEventType.LLM:
            self.ended.append(payload)

    def start_trace(self, trace_id: str | None = None) -> None: ...

    def end_trace(self, trace_id: Any = None, trace_map: Any = None) -> None: ...


def not_called(*arguments: object) -> None:
    raise AssertionError("nothing should have been computed")


class TestQueryEngine:
    @pytest.mark.parametrize("is_chat_model", [True, False])
    def test_answers_from_caches_as_full_prefill_does(
        self, corpus: Corpus, is_chat_model: bool
    ) -> None:
        llm = corpus.llm(is_chat_model=is_chat_model)
        full = corpus.llm(is_chat_model=is_chat_model, method="recompute")
        for record in RECORDS:
            answer = str(corpus.query_engine(llm).query(record.question)).strip()
            report = llm.last_report
            assert (report.method, report.chunk_hits) == ("samkv-guided", TOP_K)
            assert report.chunk_misses == {} and report.kept_ratio < 0.5
            expected = str(corpus.query_engine(full).query(record.question)).strip()
            assert full.last_report.recompute_ratio == 1
            assert answer == expected == record.workers

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
        assert [row[KEY_FIELD] for row in rows["metadatas"]] == [
            corpus.engine.key_of(text) for text in rows["documents"]
        ]
        assert "[[samkv" not in repr(rows)

    def test_prompt_holds_header_and_handle_alone(self, corpus: Corpus, prompts: list[Any]) -> None:
        corpus.query_engine(corpus.llm(is_chat_model=False)).query(ASKED.question)
        (prompt,) = prompts
        place = RECORDS.index(ASKED)
        assert f"file: {place}.txt\n\n{corpus.engine.handle_of(ASKED.text)}" in prompt
        assert len(HANDLE.findall(prompt)) == TOP_K
        assert KEY_FIELD not in prompt and "workers" not in prompt

    def test_second_process_prefills_nothing(
        self, own_corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(samkv_integrations.engine, "prefill", not_called)
        again = ingest(own_corpus.folder)
        assert again.engine.store is not own_corpus.engine.store
        llm = again.llm()
        assert str(again.query_engine(llm).query(ASKED.question)).strip() == ASKED.workers
        assert (llm.last_report.chunk_hits, llm.last_report.chunk_misses) == (TOP_K, {})

    def test_streaming(self, corpus: Corpus) -> None:
        llm = corpus.llm()
        expected = str(corpus.query_engine(llm).query(ASKED.question))
        response = corpus.query_engine(llm, streaming=True).query(ASKED.question)
        pieces = [piece for piece in response.response_gen if piece]
        assert len(pieces) > 1 and "".join(pieces) == expected
        assert llm.last_report.chunk_hits == TOP_K

    def test_async(self, corpus: Corpus) -> None:
        llm = corpus.llm()
        response = asyncio.run(corpus.query_engine(llm, use_async=True).aquery(ASKED.question))
        assert str(response).strip() == ASKED.workers
        assert llm.last_report.chunk_hits == TOP_K

    @pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize"])
    def test_handles_survive_every_way_of_composing(
        self, corpus: Corpus, prompts: list[Any], mode: str
    ) -> None:
        corpus.query_engine(corpus.llm(is_chat_model=False), response_mode=mode).query(
            ASKED.question
        )
        assert len(prompts) == (TOP_K if mode == "refine" else 1)
        handles = [handle for prompt in prompts for handle in HANDLE.findall(prompt)]
        assert len(set(handles)) == len(handles) == TOP_K

    def test_chat_engine(self, corpus: Corpus, prompts: list[Any]) -> None:
        llm = corpus.llm()
        chat = corpus.index.as_chat_engine(
            chat_mode="context",
            llm=llm,
            similarity_top_k=TOP_K,
            node_postprocessors=[SamKVPostprocessor(llm=llm)],
        )
        for record in RECORDS[:2]:
            response = chat.chat(record.question)
            assert llm.last_report.chunk_hits == TOP_K
            assert [s.node.text for s in response.source_nodes][0] == record.text
        # the second turn knows the first, and holds no handles but its own
        assert [turn["role"] for turn in prompts[1]] == ["system", "user", "assistant", "user"]
        assert len(HANDLE.findall(str(prompts[1]))) == TOP_K


class TestMisses:
    def test_lost_cache_is_counted_and_changes_nothing(self, own_corpus: Corpus) -> None:
        llm = own_corpus.llm()
        before = str(own_corpus.query_engine(llm).query(ASKED.question))
        own_corpus.key_file(ASKED.text).unlink()
        assert str(own_corpus.query_engine(llm).query(ASKED.question)) == before
        assert llm.last_report.chunk_hits == TOP_K - 1
        assert llm.last_report.chunk_misses == {"absent": 1}

    def test_broken_cache_is_counted_and_changes_nothing(self, own_corpus: Corpus) -> None:
        llm = own_corpus.llm()
        before = str(own_corpus.query_engine(llm).query(ASKED.question))
        file = own_corpus.key_file(ASKED.text)
        file.write_bytes(file.read_bytes()[:-100])
        assert str(own_corpus.query_engine(llm).query(ASKED.question)) == before
        assert sum(llm.last_report.chunk_misses.values()) == 1

    @pytest.mark.parametrize("beside", [None, b"Another text."])
    def test_broken_cache_without_its_text_is_text(
        self, own_corpus: Corpus, prompts: list[Any], beside: bytes | None
    ) -> None:
        # a handle could not be answered then
        file = own_corpus.key_file(ASKED.text)
        file.write_bytes(b"")
        if beside is None:
            file.with_suffix(".txt").unlink()
        else:
            file.with_suffix(".txt").write_bytes(beside)
        llm = own_corpus.llm()
        response = own_corpus.query_engine(llm).query(ASKED.question)
        assert str(response).strip() == ASKED.workers
        assert ASKED.text in prompts[0][-1]["content"]
        assert llm.last_report.chunk_hits == TOP_K - 1

    def test_chunk_that_the_store_never_knew_is_text(
        self, own_corpus: Corpus, prompts: list[Any]
    ) -> None:
        own_corpus.engine.store.delete(own_corpus.engine.key_of(ASKED.text))
        llm = own_corpus.llm()
        response = own_corpus.query_engine(llm).query(ASKED.question)
        assert str(response).strip() == ASKED.workers
        assert ASKED.text in str(prompts[0][-1]["content"])
        assert llm.last_report.chunk_hits == TOP_K - 1

    def test_text_changed_after_ingest_is_text(
        self, own_corpus: Corpus, prompts: list[Any]
    ) -> None:
        (id_,) = own_corpus.collection.get(where_document={"$contains": ASKED.product})["ids"]
        edited = ASKED.text.replace(ASKED.workers, "2222")
        own_corpus.collection.update(
            ids=[id_], documents=[edited], embeddings=HashingEmbedding().embed([edited])
        )
        llm = own_corpus.llm()
        response = own_corpus.query_engine(llm).query(ASKED.question)
        assert str(response).strip() == "2222"
        assert edited in prompts[0][-1]["content"]
        assert response.source_nodes[0].node.text == edited

    def test_compute_caches_what_is_missing_in_one_pass(
        self, own_corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = own_corpus.engine
        llm = own_corpus.llm()
        sources = own_corpus.query_engine(llm).query(ASKED.question).source_nodes
        keys = {engine.key_of(source.node.text) for source in sources[:2]}
        for key in keys:
            engine.store.delete(key)
        passes, prefill = [], samkv_integrations.engine.prefill

        def counted(model: Any, chunks: Any, *rest: Any) -> Any:
            passes.append({chunk.key for chunk in chunks})
            return prefill(model, chunks, *rest)

        monkeypatch.setattr(samkv_integrations.engine, "prefill", counted)
        postprocessor = SamKVPostprocessor(engine=engine, on_miss="compute")
        query_engine = own_corpus.query_engine(llm, postprocessor=postprocessor)
        for _ in range(2):  # the second time nothing is missing
            assert str(query_engine.query(ASKED.question)).strip() == ASKED.workers
            assert (llm.last_report.chunk_hits, llm.last_report.chunk_misses) == (TOP_K, {})
            assert passes == [keys]

    def test_compute_follows_a_text_that_changes_later(self, own_corpus: Corpus) -> None:
        postprocessor = SamKVPostprocessor(engine=own_corpus.engine, on_miss="compute")
        (shown,) = postprocessor.postprocess_nodes([NodeWithScore(node=TextNode(text=ASKED.text))])
        shown.node.set_content("Never seen before.")
        content = shown.node.get_content(MetadataMode.LLM)
        assert content == own_corpus.engine.handle_of("Never seen before.")

    def test_error_names_node_and_next_step(self, own_corpus: Corpus) -> None:
        own_corpus.engine.store.delete(own_corpus.engine.key_of(ASKED.text))
        postprocessor = SamKVPostprocessor(engine=own_corpus.engine, on_miss="error")
        query_engine = own_corpus.query_engine(own_corpus.llm(), postprocessor=postprocessor)
        with pytest.raises(ChunkNotCached, match="is not cached; ingest it again"):
            query_engine.query(ASKED.question)

    def test_llm_can_refuse_a_lost_cache_too(self, own_corpus: Corpus) -> None:
        handle = own_corpus.engine.handle_of(ASKED.text)
        own_corpus.key_file(ASKED.text).unlink()
        with pytest.raises(ChunkNotCached, match="absent"):
            own_corpus.llm(on_miss="error").complete(f"Documents:\n\n{handle}")


class TestPostprocessor:
    def test_only_prompts_see_the_handle(self, corpus: Corpus) -> None:
        node = TextNode(text=f" {ASKED.text}\n", metadata={"file": "2.txt", KEY_FIELD: "0" * 32})
        before = node.model_copy(deep=True)
        (shown,) = SamKVPostprocessor(engine=corpus.engine).postprocess_nodes(
            [NodeWithScore(node=node, score=0.5)]
        )
        handle = corpus.engine.handle_of(ASKED.text)
        assert shown.node.get_content(MetadataMode.LLM) == f"file: 2.txt\n\n{handle}"
        blocks = shown.node.get_content_blocks(MetadataMode.LLM)
        assert [block.text for block in blocks] == ["file: 2.txt", handle]
        for mode in (MetadataMode.NONE, MetadataMode.ALL, MetadataMode.EMBED):
            assert shown.node.get_content(mode) == node.get_content(mode)
            assert shown.node.get_content_blocks(mode) == node.get_content_blocks(mode)
        assert isinstance(shown.node, TextNode) and shown.score == 0.5
        assert (shown.node_id, shown.node.hash) == (node.node_id, node.hash)
        # what was retrieved is untouched, and shares nothing that can be changed
        assert node == before and type(node) is TextNode
        shown.node.metadata["added"] = "later"
        assert node == before

    def test_no_header_no_blank_lines(self, corpus: Corpus) -> None:
        (shown,) = SamKVPostprocessor(engine=corpus.engine).postprocess_nodes(
            [NodeWithScore(node=TextNode(text=ASKED.text, metadata={KEY_FIELD: "0" * 32}))]
        )
        assert shown.node.get_content(MetadataMode.LLM) == corpus.engine.handle_of(ASKED.text)

    def test_follows_the_text_as_it_is(self, corpus: Corpus) -> None:
        (shown,) = SamKVPostprocessor(engine=corpus.engine).postprocess_nodes(
            [NodeWithScore(node=TextNode(text=ASKED.text))]
        )
        shown.node.set_content(TEXTS[0])  # as MetadataReplacementPostProcessor does
        assert shown.node.get_content(MetadataMode.LLM) == corpus.engine.handle_of(TEXTS[0])
        shown.node.set_content("never cached")
        assert shown.node.get_content(MetadataMode.LLM) == "never cached"

    def test_documents_too(self, corpus: Corpus) -> None:
        document = Document(text=ASKED.text, metadata={"file": "2.txt"})
        (shown,) = SamKVPostprocessor(engine=corpus.engine).postprocess_nodes(
            [NodeWithScore(node=document)]
        )
        handle = corpus.engine.handle_of(ASKED.text)
        assert shown.node.get_content(MetadataMode.LLM) == f"file: 2.txt\n\n{handle}"
        assert shown.node.text == ASKED.text and shown.node.hash == document.hash
        assert shown.node.to_dict() == {
            **document.to_dict(),
            "excluded_llm_metadata_keys": [KEY_FIELD],
        }

    def test_others_pass_as_they_are(self, corpus: Corpus) -> None:
        nodes = [NodeWithScore(node=ImageNode(text=ASKED.text, image="aGk="))]
        (passed,) = SamKVPostprocessor(engine=corpus.engine).postprocess_nodes(nodes)
        assert passed.node is nodes[0].node
        (empty,) = SamKVPostprocessor(engine=corpus.engine, on_miss="error").postprocess_nodes(
            [NodeWithScore(node=TextNode(text=" "))]
        )
        assert empty.node.get_content(MetadataMode.LLM) == " "

    def test_copies_share_the_engine_and_pickles_leave_it(self, corpus: Corpus) -> None:
        postprocessor = SamKVPostprocessor(engine=corpus.engine)
        nodes = [NodeWithScore(node=TextNode(text=ASKED.text))]
        (shown,) = copy.deepcopy(postprocessor).postprocess_nodes(nodes)
        handle = corpus.engine.handle_of(ASKED.text)
        assert copy.deepcopy(shown).node.get_content(MetadataMode.LLM) == handle
        travelled = pickle.loads(pickle.dumps(shown))
        assert travelled.node.get_content(MetadataMode.LLM) == ASKED.text
        with pytest.raises(InvalidOption, match="another process"):
            pickle.loads(pickle.dumps(postprocessor)).postprocess_nodes(nodes)

    def test_mistakes(self, corpus: Corpus) -> None:
        with pytest.raises(InvalidOption, match="on_miss='skip'; allowed: text, compute, error"):
            SamKVPostprocessor(engine=corpus.engine, on_miss="skip")
        with pytest.raises(InvalidOption, match="give either llm"):
            SamKVPostprocessor()
        with pytest.raises(InvalidOption, match="MockLLM has no engine; give a SamKVLLM as llm"):
            SamKVPostprocessor(llm=MockLLM())


class TestCacheTransform:
    def test_writes_hidden_keys(self, corpus: Corpus) -> None:
        nodes = [TextNode(text=text, metadata={"file": "a.txt"}) for text in TEXTS[:2]]
        transform = SamKVCacheTransform(llm=corpus.llm())
        for _ in range(2):  # the second time changes nothing
            assert transform(nodes) is nodes
            for node in nodes:
                key = corpus.engine.key_of(node.text)
                assert node.metadata == {"file": "a.txt", KEY_FIELD: key}
                assert node.excluded_llm_metadata_keys == [KEY_FIELD]
                assert node.excluded_embed_metadata_keys == [KEY_FIELD]
                assert KEY_FIELD not in node.get_content(MetadataMode.LLM)

    def test_leaves_what_has_no_text(self, corpus: Corpus) -> None:
        nodes = [TextNode(text=" \n"), ImageNode(text=ASKED.text, image="aGk=")]
        before = copy.deepcopy(nodes)
        assert SamKVCacheTransform(engine=corpus.engine)(nodes) == before

    def test_off_the_event_loop(self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = []
        cache_chunks = Engine.cache_chunks

        def spied(self: Engine, *arguments: Any, **options: Any) -> list[str]:
            threads.append(threading.current_thread())
            return cache_chunks(self, *arguments, **options)

        monkeypatch.setattr(Engine, "cache_chunks", spied)
        nodes = asyncio.run(SamKVCacheTransform(engine=corpus.engine).acall([TextNode(text="a b")]))
        assert KEY_FIELD in nodes[0].metadata
        assert threads and threading.main_thread() not in threads

    def test_progress_bar(self, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
        for show in (False, True):
            nodes = [TextNode(text=f"A new text, and a bar: {show}.")]
            SamKVCacheTransform(engine=corpus.engine, show_progress=show)(nodes)
            assert ("caching chunks" in capsys.readouterr().err) == show

    def test_pipeline_cache_does_not_hide_an_empty_store(self, tmp_path: Path) -> None:
        documents = [Document(text=ASKED.text, doc_id="a")]
        engines = [Engine(builtin(), ChunkStore(tmp_path / name)) for name in ("one", "two")]
        pipeline = IngestionPipeline(transformations=[])
        for engine in engines:
            pipeline.transformations = [SentenceSplitter(), SamKVCacheTransform(engine=engine)]
            (node,) = pipeline.run(documents=documents)
            assert node.metadata[KEY_FIELD] == engine.key_of(ASKED.text)
            assert engine.handle_of(ASKED.text)

    def test_pickle_leaves_the_engine(self, corpus: Corpus) -> None:
        transform = SamKVCacheTransform(engine=corpus.engine, show_progress=True)
        pickled = pickle.dumps(transform)
        assert len(pickled) < 10_000
        travelled = pickle.loads(pickled)
        assert travelled.to_dict() == transform.to_dict()
        with pytest.raises(InvalidOption, match="num_workers=None"):
            travelled([TextNode(text=ASKED.text)])

    def test_dict_round_trip(self, corpus: Corpus) -> None:
        transform = SamKVCacheTransform(engine=corpus.engine)
        data = transform.to_dict()
        assert data["class_name"] == "SamKVCacheTransform"
        again = SamKVCacheTransform.from_dict(data, engine=corpus.engine)
        assert again.to_dict() == data
        with pytest.raises(InvalidOption, match="give either llm"):
            SamKVCacheTransform.from_dict(data)

    def test_too_long_is_said_before_anything_is_computed(
        self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(samkv_integrations.engine, "prefill", not_called)
        nodes = [TextNode(text="Never seen."), TextNode(text="salt " * 5000)]
        with pytest.raises(InvalidChunk, match="split it"):
            SamKVCacheTransform(engine=corpus.engine)(nodes)


def cached_prompt(corpus: Corpus, template: str = CHAT_TEMPLATE) -> str:
    handles = [corpus.engine.handle_of(text) for text in TEXTS]
    return template.format(context_str="\n\n".join(handles), query_str=ASKED.question)


class TestCalls:
    """All nine ways to call an LLM."""

    def test_complete(self, corpus: Corpus) -> None:
        llm = corpus.llm()
        response = llm.complete(cached_prompt(corpus))
        assert response.text.strip() == ASKED.workers
        report = response.raw["samkv"]
        assert report == llm.last_report.to_dict() == response.additional_kwargs["samkv"]
        assert report["chunk_hits"] == len(TEXTS)
        usage = response.raw["usage"]
        assert usage["prompt_tokens"] == report["prompt_tokens"] > 39 * len(TEXTS)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage.items() <= response.additional_kwargs.items()

    def test_complete_of_a_chat_model_is_a_user_message(
        self, corpus: Corpus, prompts: list[Any]
    ) -> None:
        llm = corpus.llm()
        llm.complete("Hello")
        llm.complete("Hello", formatted=True)
        corpus.llm(is_chat_model=False).complete("Hello")
        corpus.llm(completion_to_prompt="<{}>".format).complete("Hello")
        assert prompts == [[{"role": "user", "content": "Hello"}], "Hello", "Hello", "<Hello>"]

    def test_chat(self, corpus: Corpus) -> None:
        messages = [ChatMessage(role="user", content=cached_prompt(corpus))]
        response = corpus.llm().chat(messages)
        assert response.message.role == MessageRole.ASSISTANT
        assert response.message.content.strip() == ASKED.workers
        assert response.raw["samkv"]["chunk_hits"] == len(TEXTS)
        assert response.additional_kwargs["completion_tokens"] > 0
        # LlamaIndex writes these into the prompts of later turns
        assert response.message.additional_kwargs == {}

    def test_streams_are_incremental(self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
        steps = []
        step = Decoder.step

        def counted(self: Decoder, token: int) -> Any:
            steps.append(token)
            return step(self, token)

        monkeypatch.setattr(Decoder, "step", counted)
        llm = corpus.llm()
        prompt = "Documents:\n\n[Dunlux"  # goes on and on
        whole = llm.complete(prompt, formatted=True)
        messages = [ChatMessage(role="user", content=cached_prompt(corpus))]
        for stream, text_of, expected in (
            (llm.stream_complete(prompt, formatted=True), lambda r: r.text, whole.text),
            (llm.stream_chat(messages), lambda r: r.message.content, f" {ASKED.workers}"),
        ):
            steps.clear()
            text, seen_at = "", []
            for response in stream:
                text += response.delta
                assert text_of(response) == text
                seen_at.append(len(steps))
            assert text == expected
            assert seen_at[0] == 0 < seen_at[1] < seen_at[-1]  # decoded while it is consumed
            assert response.delta == "" and response.raw["samkv"] == llm.last_report.to_dict()
        assert len(seen_at) > 3 or len(text) < 12

    def test_async_calls_answer_alike_off_the_loop(
        self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = set()
        step = Decoder.step

        def spied(self: Decoder, token: int) -> Any:
            threads.add(threading.current_thread())
            return step(self, token)

        monkeypatch.setattr(Decoder, "step", spied)
        llm, prompt = corpus.llm(), cached_prompt(corpus)
        messages = [ChatMessage(role="user", content=prompt)]

        async def calls() -> list[str]:
            streamed = [r async for r in await llm.astream_complete(prompt)]
            chatted = [r async for r in await llm.astream_chat(messages)]
            assert len(streamed) > 2 and len(chatted) > 2
            return [
                (await llm.acomplete(prompt)).text,
                (await llm.achat(messages)).message.content,
                "".join(r.delta for r in streamed),
                "".join(r.delta for r in chatted),
                streamed[-1].text,
                chatted[-1].message.content,
            ]

        texts = asyncio.run(calls())
        assert threads and threading.main_thread() not in threads
        assert texts == [f" {ASKED.workers}"] * 6

    def test_two_async_calls_at_once(self, corpus: Corpus) -> None:
        llm = corpus.llm(is_chat_model=False)

        async def calls() -> list[Any]:
            asked = [
                cached_prompt(corpus, COMPLETION_TEMPLATE).replace(ASKED.name, record.name)
                for record in RECORDS
            ]
            return await asyncio.gather(*map(llm.acomplete, asked))

        answers = [response.text.strip() for response in asyncio.run(calls())]
        assert answers == [record.workers for record in RECORDS]

    def test_one_pair_of_events_a_call(self, corpus: Corpus) -> None:
        events, counter = LlmEvents(), TokenCountingHandler()
        llm = corpus.llm(callback_manager=CallbackManager([events, counter]))
        messages = [ChatMessage(role="user", content="Hello")]

        async def exhaust(stream: Any) -> None:
            async for _ in await stream:
                pass

        calls: list[Callable[[], Any]] = [
            lambda: llm.complete("Hello"),
            lambda: list(llm.stream_complete("Hello")),
            lambda: llm.chat(messages),
            lambda: list(llm.stream_chat(messages)),
            lambda: asyncio.run(llm.acomplete("Hello")),
            lambda: asyncio.run(exhaust(llm.astream_complete("Hello"))),
            lambda: asyncio.run(llm.achat(messages)),
            lambda: asyncio.run(exhaust(llm.astream_chat(messages))),
            lambda: llm.predict(PromptTemplate("Hello")),
        ]
        total = 0
        for n_calls, call in enumerate(calls, start=1):
            call()
            assert (len(events.started), len(events.ended)) == (n_calls, n_calls)
            total += llm.last_report.prompt_tokens
            assert counter.prompt_llm_token_count == total
        ended = events.ended[0]["formatted_prompt"], events.ended[2]["response"]
        assert ended[0] == "Hello" and ended[1].raw["samkv"]["method"] == "samkv-guided"

    def test_event_ends_when_a_call_fails(self, corpus: Corpus) -> None:
        events = LlmEvents()
        llm = corpus.llm(callback_manager=CallbackManager([events]))
        with pytest.raises(PromptTooLong):
            llm.complete("salt " * 5000)
        with pytest.raises(PromptTooLong):  # at the call, not at the first piece
            llm.stream_complete("salt " * 5000)
        assert len(events.started) == len(events.ended) == 2


class TestPrompts:
    def test_system_prompt_in_every_path_once(self, corpus: Corpus, prompts: list[Any]) -> None:
        template = PromptTemplate("Hi {who}")
        user = ChatMessage(role="user", content="Hi you")
        chat = corpus.llm(system_prompt="Be brief.")
        chat.complete("Hi you")
        list(chat.stream_complete("Hi you"))
        chat.chat([user])
        list(chat.stream_chat([user]))
        chat.predict(template, who="you")  # LlamaIndex has put it in front already
        asyncio.run(chat.acomplete("Hi you"))
        asyncio.run(chat.achat([user]))
        expected = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi you"},
        ]
        assert prompts == [expected] * 7
        prompts.clear()
        bare = corpus.llm(system_prompt="Be brief.", is_chat_model=False)
        bare.complete("Hi you")
        list(bare.stream_complete("Hi you"))
        bare.predict(template, who="you")
        assert prompts == ["Be brief.\n\nHi you"] * 3

    def test_roles_become_turns(self, corpus: Corpus, prompts: list[Any]) -> None:
        corpus.llm(system_prompt="Be brief.").chat(
            [
                ChatMessage(role="developer", content="Be kind."),
                ChatMessage(role="user", content="One."),
                ChatMessage(role="user", content="Two."),
                ChatMessage(role="model", content="Yes."),
                ChatMessage(role="user", content="Three."),
            ]
        )
        assert prompts == [
            [
                {"role": "system", "content": "Be brief.\n\nBe kind."},
                {"role": "user", "content": "One.\n\nTwo."},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Three."},
            ]
        ]

    def test_what_no_text_model_can_read(self, corpus: Corpus) -> None:
        llm = corpus.llm()
        with pytest.raises(InvalidOption, match="role 'tool'.*supported: assistant, chatbot"):
            llm.chat([ChatMessage(role="tool", content="42")])
        image = ChatMessage(role="user", blocks=[ImageBlock(url="file:///a.png")])
        with pytest.raises(InvalidOption, match="ImageBlock; this model reads text only"):
            llm.chat([image])

    def test_messages_to_prompt_wins_over_the_template(
        self, corpus: Corpus, prompts: list[Any]
    ) -> None:
        def to_prompt(messages: Any) -> str:
            return "|".join(f"{m.role.value}={m.content}" for m in messages)

        user = ChatMessage(role="user", content="Hi")
        corpus.llm(messages_to_prompt=to_prompt, system_prompt="Be brief.").chat([user])
        assert prompts == ["system=Be brief.|user=Hi"]

    def test_model_without_template(
        self, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("llama")
        monkeypatch.setattr(model.tokenizer, "chat_template", None)
        llm = SamKVLLM(engine=Engine(model), max_new_tokens=2)
        assert not llm.metadata.is_chat_model
        llm.chat([ChatMessage(role="user", content="Hi")])
        assert prompts == ["user: Hi\nassistant: "]

    def test_broken_and_unknown_handles_raise(self, corpus: Corpus) -> None:
        llm, handle = corpus.llm(), corpus.engine.handle_of(ASKED.text)
        with pytest.raises(HandleError, match="broken handle"):
            llm.complete(f"Documents:\n\n{handle[:20]}")
        with pytest.raises(HandleError, match="broken handle"):
            llm.chat([ChatMessage(role="user", content=f"{handle[2:]} and so on")])
        with pytest.raises(HandleError, match="names no chunk of this store"):
            llm.stream_complete(handle_of("0" * 32))


class TestTokenCounter:
    def test_handle_counts_as_its_chunk(self, corpus: Corpus) -> None:
        count, handle = corpus.llm().tokenizer_fn, corpus.engine.handle_of(ASKED.text)
        n_tokens = len(builtin().tokenize(ASKED.text, special=False))
        assert len(count(handle)) == n_tokens
        assert len(count("Question: who?")) == len(
            builtin().tokenize("Question: who?", special=True)
        )
        assert count("") == []

    def test_prompt_helper_packs_by_real_length(self, corpus: Corpus) -> None:
        llm = corpus.llm(context_window=150, is_chat_model=False)
        handles = [corpus.engine.handle_of(text) for text in TEXTS]
        template = PromptTemplate(COMPLETION_TEMPLATE)
        helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenizer_fn)
        packed = helper.repack(template, handles)
        assert len(packed) > 2
        assert [handle for text in packed for handle in HANDLE.findall(text)] == handles
        for text in packed:
            report = llm.complete(template.format(context_str=text, query_str="?")).raw["samkv"]
            assert report["prompt_tokens"] + llm.max_new_tokens <= llm.context_window

    def test_cut_handle_is_an_error(self, corpus: Corpus) -> None:
        llm = corpus.llm(context_window=60)  # less than a chunk beside the template
        helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenizer_fn)
        handles = [corpus.engine.handle_of(text) for text in TEXTS]
        pieces = helper.repack(PromptTemplate(COMPLETION_TEMPLATE), handles, padding=0)
        with pytest.raises(HandleError, match="broken handle"):
            llm.complete(pieces[0])


class TestConfiguration:
    def test_call_options_win_over_those_of_the_llm(self, corpus: Corpus) -> None:
        prompt = "Documents:\n\n[Dunlux"
        llm = corpus.llm(generate_kwargs={"temperature": 2.0, "seed": 1})
        sampled = llm.complete(prompt, formatted=True).text
        assert sampled == llm.complete(prompt, formatted=True).text  # the seed
        assert sampled != llm.complete(prompt, formatted=True, seed=2).text
        greedy = corpus.llm().complete(prompt, formatted=True).text
        assert llm.complete(prompt, formatted=True, temperature=0.0).text == greedy
        assert llm.complete(prompt, formatted=True, temperature=None).text == sampled
        asked = cached_prompt(corpus)
        answers = {llm.complete(asked, seed=seed, top_p=1e-6).text for seed in range(3)}
        assert answers == {f" {ASKED.workers}"}  # the likeliest token alone is left

    def test_length_and_stop(self, corpus: Corpus) -> None:
        llm, prompt = corpus.llm(), "Documents:\n\n[Dunlux"
        text = llm.complete(prompt, formatted=True).text
        for name in ("max_tokens", "max_new_tokens"):
            response = llm.complete(prompt, formatted=True, **{name: 3})
            assert response.raw["usage"]["completion_tokens"] == 3
            assert text.startswith(response.text)
        stop = text[4:7]
        for given in (stop, [stop]):
            shortened = llm.complete(prompt, formatted=True, stop=given).text
            assert shortened == text[: text.index(stop)]
        always = corpus.llm(generate_kwargs={"stop": [stop]})
        assert always.complete(prompt, formatted=True).text == shortened

    @pytest.mark.parametrize("options", [{"top_k": 5}, {"temprature": 0.5}, {"do_sample": True}])
    def test_unknown_option(self, corpus: Corpus, options: dict[str, Any]) -> None:
        (name,) = options
        with pytest.raises(UnknownOption, match=f"{name}.*known: seed, stop, temperature, top_p"):
            corpus.llm(generate_kwargs=options)
        with pytest.raises(UnknownOption, match=f"{name}.*known: max_new_tokens, max_tokens, seed"):
            corpus.llm().complete("Hello", **options)

    def test_values_out_of_range(self, corpus: Corpus) -> None:
        window = corpus.engine.model.context_window
        for options, message in (
            ({"generate_kwargs": {"temperature": -1}}, "temperature=-1"),
            ({"generate_kwargs": {"top_p": 0}}, "top_p=0"),
            ({"on_miss": "skip"}, "on_miss='skip'; allowed: text, compute, error"),
            (
                {"context_window": window + 1},
                f"context_window={window + 1}; 'builtin' has {window}",
            ),
            ({"context_window": 12}, "max_new_tokens=12 leaves no room"),
            ({"model_name": "other"}, "model_name='other'.*'builtin'"),
            ({"kv_dir": "elsewhere"}, "kv_dir='elsewhere'"),
            ({"device_map": "cuda"}, "device_map='cuda'.*'cpu'"),
            ({"dtype": "float32"}, "dtype='float32'.*'bfloat16'"),
        ):
            with pytest.raises(InvalidOption, match=message):
                corpus.llm(**options)
        with pytest.raises(UnknownOption, match="method 'magic'"):
            corpus.llm(method="magic")
        with pytest.raises(UnknownOption, match="eviction 'magic'"):
            corpus.llm(eviction="magic")
        with pytest.raises(InvalidOption, match="give model_name"):
            SamKVLLM()
        with pytest.raises(InvalidOption, match="max_tokens and max_new_tokens"):
            corpus.llm().complete("Hello", max_tokens=1, max_new_tokens=1)
        with pytest.raises(InvalidOption, match="max_new_tokens=0"):
            corpus.llm().complete("Hello", max_tokens=0)

    def test_metadata_comes_from_the_model(self, corpus: Corpus) -> None:
        metadata = SamKVLLM.from_engine(corpus.engine).metadata
        assert (metadata.model_name, metadata.context_window) == (
            "builtin",
            builtin().context_window,
        )
        assert (metadata.num_output, metadata.is_chat_model) == (256, True)
        assert not metadata.is_function_calling_model
        assert (
            SamKVLLM.from_engine(corpus.engine, context_window=300).metadata.context_window == 300
        )

    def test_evicts_as_it_was_told(self, corpus: Corpus) -> None:
        report = corpus.llm(eviction="h2o").complete("Hello there, who are you?").raw["samkv"]
        assert report["eviction"] == "h2o"
        report = corpus.llm(eviction="none").complete("Hello there, who are you?").raw["samkv"]
        assert report["eviction"] is None

    def test_loads_by_name_and_folder(self, tmp_path: Path) -> None:
        llm = SamKVLLM(model_name="builtin", kv_dir=tmp_path / "kv", device_map="cpu")
        key = llm.engine.cache_chunk(ASKED.text)
        other = SamKVLLM.from_dict(llm.to_dict())
        assert other.engine is not llm.engine
        assert other.engine.store.keys(other.engine.fingerprint) == [key]

    def test_dict_round_trip(self, corpus: Corpus) -> None:
        llm = corpus.llm(
            generate_kwargs={"temperature": 0.5},
            system_prompt="Be brief.",
            method="reuse",
            eviction="h2o",
        )
        data = llm.to_dict()
        assert data["class_name"] == SamKVLLM.class_name() == "SamKV_LLM"
        assert data["kv_dir"] == str(corpus.folder / "kv") and "engine" not in data
        again = SamKVLLM.from_dict(data, engine=corpus.engine)
        assert again.to_dict() == data and again.engine is corpus.engine

    def test_copies_share_the_engine_and_nothing_else(self, corpus: Corpus) -> None:
        llm = corpus.llm(generate_kwargs={"temperature": 0.5})
        for other in (copy.deepcopy(llm), llm.model_copy(deep=True)):
            assert other.engine is llm.engine
            other.generate_kwargs["temperature"] = 0.9
            assert llm.generate_kwargs == {"temperature": 0.5}
        travelled = pickle.loads(pickle.dumps(llm))
        assert travelled.metadata == llm.metadata
        with pytest.raises(InvalidOption, match="another process"):
            travelled.complete("Hello")

    def test_classes_are_what_llama_index_looks_for(self) -> None:
        assert issubclass(SamKVLLM, BaseLLM) and issubclass(SamKVLLM, LLM)
        assert issubclass(SamKVPostprocessor, BaseNodePostprocessor)
        assert issubclass(SamKVCacheTransform, TransformComponent)
        assert SamKVPostprocessor.class_name() == "SamKVPostprocessor"

    def test_llama_index_stays_a_namespace(self) -> None:
        # one __init__.py above samkv/ would hide every other LlamaIndex package
        root = Path(__file__).parents[1] / "connectors" / "llama_index"
        inits = {path.relative_to(root).as_posix() for path in root.rglob("__init__.py")}
        parts = ("llms", "postprocessor", "vector_stores")
        assert inits == {f"{part}/samkv/__init__.py" for part in parts}

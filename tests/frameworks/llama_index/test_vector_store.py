"""The vector store: nodes go in and out through LlamaIndex, and the caches follow them."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import ImageNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.vector_stores.samkv import SamKVChromaVectorStore
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import KEY_FIELD, open_collection
from samkv_integrations.errors import InvalidChunk, InvalidOption, UnknownOption
from tests.support.chroma_link import assert_in_step, client_of, files, keys_of, records
from tests.support.chroma_server import HOST
from tests.support.records import RECORDS, TEXTS, builtin
from tests.support.tested_runtime import model_class

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")

VECTOR = [1.0, 0.0, 0.0, 0.0]


class Letters(BaseEmbedding):
    """Four numbers a text, for tests in which it does not matter what is near."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [1.0, *(float(text.count(letter)) for letter in "aei")]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8)


@pytest.fixture(params=["folder", "server"])
def either(
    request: pytest.FixtureRequest, engine: Engine, tmp_path: Path
) -> Iterator[SamKVChromaVectorStore]:
    """A store on a folder, and one on a server."""
    if request.param == "folder":
        yield SamKVChromaVectorStore.from_params(
            "town", persist_dir=tmp_path / "chroma", engine=engine
        )
        return
    port = request.getfixturevalue("chroma_port")
    store = SamKVChromaVectorStore.from_params("nodes", HOST, str(port), engine=engine)
    yield store
    client_of(store.client).delete_collection("nodes")


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> SamKVChromaVectorStore:
    collection = open_collection(tmp_path / "chroma", "town", create=True)
    return SamKVChromaVectorStore(collection, engine=engine)


def node(id_: str, text: str, doc_id: str | None = None, **metadata: Any) -> TextNode:
    made = TextNode(id_=id_, text=text, metadata=metadata, embedding=VECTOR)
    if doc_id:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=doc_id)
    return made


class TestAdd:
    def test_records_and_caches(self, either: SamKVChromaVectorStore) -> None:
        nodes = [node("a", TEXTS[0], "doc", page=3), node("b", f" {TEXTS[1]}\n", file=None)]
        assert either.add(nodes) == ["a", "b"]
        assert_in_step(either, TEXTS[0], f" {TEXTS[1]}\n")
        rows = dict(zip(*(either.client.get()[name] for name in ("ids", "metadatas")), strict=True))
        assert rows["a"]["page"] == 3 and rows["a"]["document_id"] == "doc"
        assert rows["b"]["file"] == ""  # as upstream writes None

    def test_images_and_empty_nodes_have_no_key(self, store: SamKVChromaVectorStore) -> None:
        image = ImageNode(id_="i", text="a caption", image_url="http://x/y", embedding=VECTOR)
        image.metadata[KEY_FIELD] = "0" * 32
        store.add([node("a", TEXTS[0]), node("i", TEXTS[1])])
        store.add([image, node("e", ""), node("s", " \n")])
        held = records(store)
        assert {id_ for id_, (_, key) in held.items() if key} == {"a"}
        assert held["i"][0] == "a caption"
        assert files(store) == keys_of(store, TEXTS[0])
        (back,) = store.get_nodes(["i"])
        assert isinstance(back, ImageNode) and back.image_url == "http://x/y"

    def test_mistakes_are_said_before_anything_is_computed(
        self, store: SamKVChromaVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.add([node("z", TEXTS[5])])
        monkeypatch.setattr(model_class(), "prefill", _not_called)
        good, wide, none = (node(id_, TEXTS[0]) for id_ in "gwn")
        wide.embedding, none.embedding = [*VECTOR, 0.0], None
        for bad, error, match in (
            (wide, InvalidOption, "dimension 5 does not fit collection 'town'.* dimension 4"),
            (none, InvalidOption, "node 'n' has no embedding"),
            (node("m", TEXTS[1], page=[1]), InvalidOption, "node 'm' cannot be stored.*page"),
            (node("g", TEXTS[1]), InvalidOption, "id 'g' occurs twice"),
            (node("l", "words " * 5000), InvalidChunk, "longer than the .* split it"),
        ):
            with pytest.raises(error, match=match):
                store.add([good, bad])
        assert_in_step(store, TEXTS[5])
        assert store.add([]) == []


class TestDelete:
    def test_by_ids_and_filters(self, store: SamKVChromaVectorStore) -> None:
        kinds = ["x", "y", "x", "y"]
        store.add([node(k, t, kind=x) for k, t, x in zip("abcd", TEXTS, kinds, strict=False)])
        is_x = MetadataFilters(filters=[_equal("kind", "x")])
        store.delete_nodes(["a", "b"], is_x)
        assert_in_step(store, *TEXTS[1:4])
        store.delete_nodes(["nobody"])
        store.delete("nobody")
        assert [n.node_id for n in store.get_nodes(filters=is_x)] == ["c"]
        assert {n.node_id for n in store.get_nodes()} == {"b", "c", "d"}
        both = MetadataFilters(
            filters=[_equal("kind", "x"), _equal("kind", "y")], condition=FilterCondition.OR
        )
        store.delete_nodes(filters=both)
        assert_in_step(store)

    def test_mistakes(self, store: SamKVChromaVectorStore) -> None:
        store.add([node("a", TEXTS[0])])
        for ids, filters in ((None, None), ([], None), ([], MetadataFilters(filters=[]))):
            with pytest.raises(InvalidOption, match=r"name no record.*use clear\(\)"):
                store.delete_nodes(ids, filters)
        odd = MetadataFilters(filters=[MetadataFilter(key="k", value="v", operator="text_match")])
        for use in (store.delete_nodes, store.get_nodes):
            with pytest.raises(InvalidOption, match="(?i)text_match"):
                use(filters=odd)
            with pytest.raises(InvalidOption, match="it must be MetadataFilters"):
                use(filters=[_equal("document_id", "None")])  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="ids='ab' is one id; give a list"):
            store.delete_nodes("ab")  # type: ignore[arg-type]  # which deleted record 'a'
        assert_in_step(store, TEXTS[0])


class TestQuery:
    def test_mmr_and_metadata_alone(self, store: SamKVChromaVectorStore) -> None:
        store.add([node("a", TEXTS[0], page=1), node("b", TEXTS[1], page=2)])
        mmr = VectorStoreQuery(
            query_embedding=VECTOR, similarity_top_k=2, mode=VectorStoreQueryMode.MMR
        )
        assert set(store.query(mmr, mmr_threshold=0.5).ids or ()) == {"a", "b"}
        page = MetadataFilters(filters=[_equal("page", 2)])
        assert store.query(VectorStoreQuery(filters=page)).ids == ["b"]


def documents(**changes: str) -> list[Document]:
    """Two documents of one chunk each, which share none, and one of two."""
    texts = {"one": TEXTS[0], "two": TEXTS[1], "three": TEXTS[2], **changes}
    return [Document(text=text, doc_id=name) for name, text in texts.items() if text]


class TestLlamaIndex:
    @pytest.fixture
    def index(self, store: SamKVChromaVectorStore, engine: Engine) -> VectorStoreIndex:
        return VectorStoreIndex.from_vector_store(
            store,
            embed_model=Letters(),
            transformations=[SentenceSplitter(chunk_size=400), SamKVCacheTransform(engine=engine)],
        )

    def test_index(self, index: VectorStoreIndex, store: SamKVChromaVectorStore) -> None:
        for document in documents():
            index.insert(document)
        assert_in_step(store, *TEXTS[:3])
        index.insert(Document(text=TEXTS[0], doc_id="again"))
        index.delete_ref_doc("one", delete_from_docstore=True)
        assert_in_step(store, *TEXTS[:3])
        index.delete_ref_doc("again", delete_from_docstore=True)
        assert_in_step(store, *TEXTS[1:3])
        refreshed = index.refresh_ref_docs(documents(one="", two=TEXTS[4]))
        assert refreshed == [True, False]
        assert_in_step(store, TEXTS[2], TEXTS[4])
        ids = [n.node_id for n in store.get_nodes()]
        index.delete_nodes(ids[:1])
        assert len(files(store)) == len(records(store)) == 1

    def test_without_the_transform_the_store_caches(self, store: SamKVChromaVectorStore) -> None:
        index = VectorStoreIndex.from_vector_store(
            store, embed_model=Letters(), transformations=[SentenceSplitter(chunk_size=400)]
        )
        for document in documents():
            index.insert(document)
        assert_in_step(store, *TEXTS[:3])
        llm = SamKVLLM(engine=store.kv_link.engine, max_new_tokens=4)
        answer = index.as_query_engine(llm=llm, similarity_top_k=3).query(RECORDS[0].question)
        assert llm.last_report is not None and len(answer.source_nodes) == 3
        assert {n.node.get_content() for n in answer.source_nodes} == set(TEXTS[:3])

    @pytest.mark.parametrize(
        ("strategy", "is_async"), [("UPSERTS", False), ("UPSERTS_AND_DELETE", True)]
    )
    def test_pipeline(
        self, store: SamKVChromaVectorStore, engine: Engine, strategy: str, is_async: bool
    ) -> None:
        pipeline = IngestionPipeline(
            transformations=[
                SentenceSplitter(chunk_size=400), SamKVCacheTransform(engine=engine), Letters(),
            ],
            vector_store=store,
            docstore=SimpleDocumentStore(),
            docstore_strategy=DocstoreStrategy[strategy],
        )  # fmt: skip

        def ingest(**changes: str) -> None:
            if is_async:
                asyncio.run(pipeline.arun(documents=documents(**changes)))
            else:
                pipeline.run(documents=documents(**changes))

        ingest()
        assert_in_step(store, *TEXTS[:3])
        ingest()
        assert_in_step(store, *TEXTS[:3])
        ingest(two=TEXTS[3])
        assert_in_step(store, TEXTS[0], TEXTS[3], TEXTS[2])
        ingest(one="", two=TEXTS[3])
        left = [TEXTS[3], TEXTS[2]] + ([TEXTS[0]] if strategy == "UPSERTS" else [])
        assert_in_step(store, *left)
        assert store.kv_link.sync(grace_s=0).n_pruned == 0

    @pytest.mark.parametrize("way", ["refresh", "refresh, no transform", *DocstoreStrategy])
    def test_unchanged_texts_are_not_computed_again(
        self,
        store: SamKVChromaVectorStore,
        engine: Engine,
        way: str | DocstoreStrategy,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """LlamaIndex deletes all nodes of a document that changed, and adds them again."""
        computed, prefill = list[str](), model_class().prefill

        def counted(model: Any, batch: Any, *rest: Any) -> Any:
            computed.extend(ref.text for ref in batch)
            return prefill(model, batch, *rest)

        monkeypatch.setattr(model_class(), "prefill", counted)
        steps: list[Any] = [SentenceSplitter(chunk_size=60, chunk_overlap=0)]
        steps += [] if "no transform" in way else [SamKVCacheTransform(engine=engine)]
        index = VectorStoreIndex.from_vector_store(
            store, embed_model=Letters(), transformations=steps
        )
        pipeline = IngestionPipeline(
            transformations=[*steps, Letters()], vector_store=store, docstore=SimpleDocumentStore()
        )
        if isinstance(way, DocstoreStrategy):
            pipeline.docstore_strategy = way

        def ingest(text: str) -> set[str]:
            given = [Document(text=text, doc_id="one"), Document(text=TEXTS[5], doc_id="two")]
            if isinstance(way, DocstoreStrategy):
                pipeline.run(documents=given)
            else:
                index.refresh_ref_docs(given)
            return {n.get_content() for n in store.get_nodes()}

        whole = "\n\n\n".join(TEXTS[:5])
        before = ingest(whole)
        assert len(before) > 5 and sorted(computed) == sorted(before)
        assert ingest(whole) == before and len(computed) == len(before)
        after = ingest(f"{whole} It is so.")
        assert after - before and sorted(computed) == sorted([*before, *(after - before)])


class TestComponent:
    def test_async_twins_leave_the_event_loop_free(
        self, store: SamKVChromaVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: dict[str, threading.Thread] = {}
        for name in ("add", "delete", "delete_nodes", "clear", "get_nodes", "query"):
            call: Callable[..., Any] = getattr(SamKVChromaVectorStore, name)

            def noted(self: Any, *args: Any, call: Any = call, name: str = name, **kw: Any) -> Any:
                threads[name] = threading.current_thread()
                return call(self, *args, **kw)

            monkeypatch.setattr(SamKVChromaVectorStore, name, noted)

        async def use() -> None:
            await store.async_add([node(k, t, "d") for k, t in zip("abc", TEXTS, strict=False)])
            assert len(await store.aget_nodes(["a"])) == 1
            asked = VectorStoreQuery(query_embedding=VECTOR, similarity_top_k=3)
            assert len((await store.aquery(asked)).ids or ()) == 3
            await store.adelete_nodes(["a"])
            await store.adelete("d")
            assert not files(store)
            await store.async_add([node("a", TEXTS[0])])
            await store.aclear()

        asyncio.run(use())
        assert_in_step(store)
        assert len(threads) == 6
        assert threading.main_thread() not in threads.values()

    def test_takes_an_llm(self, engine: Engine, tmp_path: Path) -> None:
        llm = SamKVLLM(engine=engine)
        store = SamKVChromaVectorStore.from_params("t-1", persist_dir=tmp_path / "c", llm=llm)
        assert store.kv_link.engine is engine
        again = SamKVChromaVectorStore.from_collection(store.client, llm=llm)
        assert again.kv_link.collection is store.client
        assert store.client._embedding_function is None

    def test_to_dict_has_no_engine_and_no_headers(self, store: SamKVChromaVectorStore) -> None:
        written = store.to_dict()
        assert written["class_name"] == store.class_name() == "SamKVChromaVectorStore"
        assert written["collection_name"] == "town"
        assert not {"engine", "llm", "_engine"} & set(written) and written["headers"] is None

    def test_copies_share_and_pickles_leave(self, store: SamKVChromaVectorStore) -> None:
        twin = copy.deepcopy(store)
        assert twin is not store and twin.client is store.client
        twin.add([node("a", TEXTS[0])])
        assert_in_step(store, TEXTS[0])
        sent = pickle.loads(pickle.dumps(store))
        assert sent.collection_name == "town"
        for use in (sent.clear, lambda: sent.add([node("a", TEXTS[0])]), sent.get_nodes):
            with pytest.raises(InvalidOption, match="came out of a pickle"):
                use()

    def test_mistakes(self, engine: Engine, tmp_path: Path) -> None:
        collection = open_collection(tmp_path / "chroma", "town", create=True)
        with pytest.raises(InvalidOption, match="either llm .* or engine"):
            SamKVChromaVectorStore(collection)
        with pytest.raises(InvalidOption, match="MockLLM has no engine"):
            SamKVChromaVectorStore(collection, llm=MockLLM())
        with pytest.raises(UnknownOption, match="did you mean 'chroma_collection'"):
            SamKVChromaVectorStore(chroma_colection=collection, engine=engine)  # type: ignore[call-arg]
        folder = str(tmp_path / "chroma")
        for where in (
            {},
            {"host": HOST},
            {"port": 1},
            {"host": HOST, "port": 1, "persist_dir": folder},
        ):
            with pytest.raises(InvalidOption, match="either persist_dir, or host and port"):
                SamKVChromaVectorStore.from_params("town", engine=engine, **where)
        with pytest.raises(InvalidOption, match="port='http'"):
            SamKVChromaVectorStore.from_params("town", HOST, "http", engine=engine)
        inside = Engine(builtin(), ChunkStore(tmp_path / "chroma" / "kv"))
        with pytest.raises(InvalidOption, match="inside Chroma's folder"):
            SamKVChromaVectorStore(collection, engine=inside)


def _equal(key: str, value: str | int) -> MetadataFilter:
    return MetadataFilter(key=key, value=value)


def _not_called(*arguments: object) -> None:
    raise AssertionError("nothing should have been computed")

"""The vector store: documents go in and out through LangChain, and the caches follow them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chromadb.api.models.Collection import Collection
from chromadb.api.types import SearchResult
from langchain_chroma import Chroma
from langchain_core.documents import Document

from langchain_samkv import OfflineEmbeddings, SamKVChroma
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import KEY_FIELD
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.errors import InvalidChunk, InvalidOption, UnknownOption
from tests.support.chroma_link import assert_in_step, files, keys_of, records
from tests.support.chroma_server import HOST
from tests.support.langchain_store import VECTOR, Letters, client_of
from tests.support.records import RECORDS, TEXTS, builtin
from tests.support.tested_runtime import model_class


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8)


@pytest.fixture(params=["folder", "server"])
def either(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[SamKVChroma]:
    """A store on a folder, and one on a server."""
    where: dict[str, Any] = {}
    if request.param == "folder":
        where = {"persist_directory": str(tmp_path / "chroma")}
    if request.param == "server":
        where = {"host": HOST, "port": request.getfixturevalue("chroma_port")}
    store = SamKVChroma("lc-documents", Letters(), engine=engine, **where)
    yield store
    store.delete_collection()


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> SamKVChroma:
    return open_store(engine, tmp_path)


def open_store(engine: Engine, folder: Path, name: str = "town") -> SamKVChroma:
    return SamKVChroma(name, Letters(), str(folder / "chroma"), engine=engine)


def doc(id_: str | None, text: str, **metadata: Any) -> Document:
    return Document(id=id_, page_content=text, metadata=metadata)


def forbid_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no chunk may be read by the model."""
    monkeypatch.setattr(model_class(), "prefill", _not_called)


class TestAdd:
    def test_records_and_caches(self, either: SamKVChroma) -> None:
        given = [doc("a", TEXTS[0], page=3, tags=["x", "y"]), doc(None, f" {TEXTS[1]}\n")]
        before = [each.model_copy(deep=True) for each in given]
        first, second = either.add_documents(given)
        assert first == "a" and len(second) == 36
        assert given == before
        assert_in_step(either, TEXTS[0], f" {TEXTS[1]}\n")
        assert either.get("a")["metadatas"] == [
            {"page": 3, "tags": ["x", "y"], KEY_FIELD: either.kv_link.engine.key_of(TEXTS[0])}
        ]

    def test_texts_may_come_from_anywhere(self, store: SamKVChroma) -> None:
        assert store.add_texts((text for text in TEXTS[:2]), ids=["a", None])[0] == "a"
        store.add_texts(TEXTS[2:4], [{"page": 1}], ["c", "d"])  # as upstream fills up
        assert store.get("c")["metadatas"][0]["page"] == 1
        assert set(store.get("d")["metadatas"][0]) == {KEY_FIELD}
        assert store.add_texts([]) == store.add_documents([]) == []
        assert_in_step(store, *TEXTS[:4])

    def test_from_texts_and_documents(self, engine: Engine, tmp_path: Path) -> None:
        folder = str(tmp_path / "chroma")
        store = SamKVChroma.from_documents(
            [doc("a", TEXTS[0], page=1), doc(None, TEXTS[1])],
            Letters(),
            collection_name="town",
            persist_directory=folder,
            engine=engine,
        )
        again = SamKVChroma.from_texts(
            TEXTS[2:4], Letters(), [{"page": 2}], ["c", "d"], "town",
            persist_directory=folder, engine=engine,
        )  # fmt: skip
        assert type(store) is type(again) is SamKVChroma
        assert_in_step(store, *TEXTS[:4])
        assert {"a", "c", "d"} < set(records(again))
        with pytest.raises(UnknownOption, match="did you mean 'persist_directory'"):
            SamKVChroma.from_texts(TEXTS, Letters(), persist_dir=folder, engine=engine)

    def test_mistakes_are_said_before_anything_is_computed(
        self, store: SamKVChroma, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.add_texts(TEXTS[5:], ids=["z"])
        forbid_prefill(monkeypatch)
        metadata: list[Any] = [{"k": {}}, {"k": [1, "x"]}, {"k": []}, {"k": b"x"}, {3: 4}]
        for row in (*metadata, {"chroma:document": "x"}):
            with pytest.raises(InvalidOption, match="metadata of document 'b' cannot be stored"):
                store.add_texts(TEXTS[:2], [{}, row], ["a", "b"])
        for ids, texts, error, match in (
            (["a", "a"], TEXTS[:2], InvalidOption, "id 'a' occurs twice"),
            (["a", ""], TEXTS[:2], InvalidOption, "id ''; it must be a string"),
            (["a", 7], TEXTS[:2], InvalidOption, "id 7; it must be a string"),
            (["a"], TEXTS[:2], InvalidOption, "1 ids, 2 texts"),
            (["a", "b"], [TEXTS[0], ""], InvalidChunk, "document 'b' holds no text; leave"),
            (["a", "b"], [TEXTS[0], " \n"], InvalidChunk, "document 'b' holds no text; leave"),
            (
                ["a", "b"],
                [TEXTS[0], None],
                InvalidChunk,
                "document .b. is a NoneType; it must",
            ),
            (["a", "b"], [TEXTS[0], "word " * 5000], InvalidChunk, "longer than the .* split it"),
            (None, TEXTS[0], InvalidOption, r"is one text; give a list"),
        ):
            with pytest.raises(error, match=match):
                store.add_texts(texts, ids=ids)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="metadata"):
            store.add_texts(TEXTS[:1], metadata=[{}])  # type: ignore[call-arg]
        assert_in_step(store, TEXTS[5])

    def test_an_embedding_of_another_size(
        self, store: SamKVChroma, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.add_texts(TEXTS[:1], ids=["a"])
        forbid_prefill(monkeypatch)
        wide = SamKVChroma("town", OfflineEmbeddings(), client=client_of(store), engine=engine)
        for use in (wide.add_texts, lambda texts: wide.update_document("a", doc("a", *texts))):
            with pytest.raises(InvalidOption, match="dimension 1024 does not fit .* dimension 4"):
                use(TEXTS[1:2])
        for search in (
            wide.similarity_search,
            wide.max_marginal_relevance_search,
            wide.similarity_search_with_vectors,
        ):
            with pytest.raises(InvalidOption, match="'town' refused the query.* 4, got 1024"):
                search(TEXTS[0])
        assert_in_step(store, TEXTS[0])

    def test_without_an_embedding_nothing_is_downloaded(
        self, store: SamKVChroma, engine: Engine
    ) -> None:
        store.add_texts(TEXTS[:1], ids=["a"])
        bare = SamKVChroma("town", client=client_of(store), engine=engine)
        for use in (
            lambda: bare.add_texts(TEXTS[1:2]),
            lambda: bare.update_document("a", doc(None, TEXTS[1])),
            lambda: bare.similarity_search("x"),
            lambda: bare.max_marginal_relevance_search("x"),
            lambda: bare.similarity_search_with_vectors("x"),
        ):
            with pytest.raises(InvalidOption, match="without an embedding_function; give one"):
                use()
        assert [each.id for each in bare.similarity_search_by_vector(VECTOR)] == ["a"]
        assert_in_step(store, TEXTS[0])
        bare.delete(["a"])
        assert_in_step(store)


class TestUpdate:
    def test_the_cache_follows_the_text(self, either: SamKVChroma) -> None:
        either.add_documents([doc("a", TEXTS[0], page=1, old=True), doc("b", TEXTS[0])])
        either.update_document("a", doc(None, TEXTS[1], page=2))
        assert_in_step(either, TEXTS[0], TEXTS[1])  # "b" still has the text that "a" had
        either.update_documents(["a", "b"], [doc("x", TEXTS[2], old=None), doc("y", TEXTS[3])])
        assert_in_step(either, TEXTS[2], TEXTS[3])
        (back,) = either.get_by_ids(["a"])
        assert back.metadata == {"page": 2}  # merged, and None takes away, as in Chroma

    def test_mistakes(self, store: SamKVChroma) -> None:
        store.add_texts(TEXTS[:1], ids=["a"])
        with pytest.raises(InvalidOption, match="no document 'b' to update.*add_documents"):
            store.update_documents(["a", "b"], [doc("a", TEXTS[1]), doc("b", TEXTS[2])])
        with pytest.raises(InvalidOption, match="1 ids and 2 documents"):
            store.update_documents(["a"], [doc("a", TEXTS[1]), doc("b", TEXTS[2])])
        with pytest.raises(InvalidOption, match="metadata of document 'a'"):
            store.update_document("a", doc("a", TEXTS[1], nested={"x": 1}))
        store.update_documents([], [])
        assert_in_step(store, TEXTS[0])


class TestDelete:
    def test_by_what_documents_hold(self, either: SamKVChroma) -> None:
        titles = [{"$contains": text.split("\n")[0]} for text in TEXTS]
        either.add_texts(TEXTS[:4], [{"kind": x} for x in "xyxy"], list("abcd"))
        either.delete(where_document=titles[0])
        assert_in_step(either, *TEXTS[1:4])
        either.delete(["b", "c"], where_document=titles[1])
        assert_in_step(either, *TEXTS[2:4])
        for nothing in ({"ids": ["d"]}, {"where": {"kind": "y"}}, {"ids": ["d", "nobody"]}):
            either.delete(**nothing, where_document=titles[2])
        assert_in_step(either, *TEXTS[2:4])
        either.delete(where={"kind": "x"}, where_document={"$or": titles[2:4]})
        assert_in_step(either, TEXTS[3])

    def test_mistakes(self, store: SamKVChroma) -> None:
        store.add_texts(TEXTS[:1], [{"kind": "x"}])
        for which in (
            {}, {"ids": []}, {"where": {}}, {"where_document": {}}, {"ids": [], "where": {"k": 1}},
            {"ids": [], "where_document": {"$contains": "a"}},
        ):  # fmt: skip
            with pytest.raises(InvalidOption, match=r"name no document .*reset_collection\(\)"):
                store.delete(**which)
        with pytest.raises(InvalidOption, match=r"(?i)\$nothing"):
            store.delete(where={"kind": {"$nothing": 1}})
        with pytest.raises(InvalidOption, match=r"(?i)\$nothing"):
            store.delete(where_document={"$nothing": "x"})
        assert_in_step(store, TEXTS[0])

    def test_the_whole_collection(self, either: SamKVChroma, engine: Engine) -> None:
        other = SamKVChroma("lc-other", Letters(), client=client_of(either), engine=engine)
        either.add_texts(TEXTS[:2])
        other.add_texts(TEXTS[1:3])
        either.reset_collection()
        assert not records(either)
        assert files(either) == keys_of(either, *TEXTS[1:3])
        either.add_texts(TEXTS[3:4])
        assert files(either) == keys_of(either, *TEXTS[1:4])
        other.delete_collection()
        assert_in_step(either, TEXTS[3])
        assert "lc-other" not in {each.name for each in client_of(either).list_collections()}
        other.delete_collection()  # once is enough
        with pytest.raises(InvalidOption, match=r"'lc-other' was deleted; reset_collection\(\)"):
            other.add_texts(TEXTS[:1])
        with pytest.raises(InvalidOption, match="'lc-other' refused the query"):
            other.similarity_search("x")
        other.reset_collection()
        other.add_texts(TEXTS[:1])
        assert len(records(other)) == 1
        other.delete_collection()

    def test_a_collection_that_another_client_has_deleted(
        self, either: SamKVChroma, engine: Engine
    ) -> None:
        client = client_of(either)
        other = SamKVChroma("lc-other", Letters(), client=client, engine=engine)
        other.add_texts(TEXTS[:1])
        client.delete_collection("lc-other")
        other.reset_collection()
        other.add_texts(TEXTS[1:2])
        assert [text for text, _ in records(other).values()] == TEXTS[1:2]
        client.delete_collection("lc-other")
        theirs = Chroma("lc-other", Letters(), client=client)
        theirs.add_texts(["theirs"])
        for _ in range(2):
            other.delete_collection()
        assert theirs.get()["documents"] == ["theirs"]  # of the same name, and not ours
        with pytest.raises(InvalidOption, match="'lc-other' was deleted"):
            other.add_texts(TEXTS[:1])
        theirs.delete_collection()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[SamKVChroma, Chroma]:
    """Ours, and upstream's on a collection with the same records and no keys."""
    folder = tmp_path_factory.mktemp("read")
    engine = Engine(builtin(), ChunkStore(folder / "kv"), block_size=8)
    ours = SamKVChroma("ours", Letters(), str(folder / "chroma"), engine=engine)
    theirs = Chroma("theirs", Letters(), client=client_of(ours))
    for store in (ours, theirs):
        store.add_texts(TEXTS, [{"page": n} for n in range(len(TEXTS))], list("abcdef"))
    return ours, theirs


def documents_of(found: list[Any]) -> list[Document]:
    return [each[0] if isinstance(each, tuple) else each for each in found]


class TestRead:
    @pytest.mark.parametrize(
        "search",
        [
            lambda s: s.similarity_search(TEXTS[2], k=3),
            lambda s: s.similarity_search(TEXTS[2], filter={"page": {"$gte": 4}}),
            lambda s: s.similarity_search(TEXTS[2], where_document={"$contains": "music"}),
            lambda s: s.similarity_search_with_score(TEXTS[2], 2),
            lambda s: s.similarity_search_with_relevance_scores(TEXTS[2], 1),
            lambda s: s.similarity_search_by_vector(VECTOR, 2, {"page": 3}),
            lambda s: s.similarity_search_by_vector_with_relevance_scores(VECTOR, 2),
            lambda s: s.max_marginal_relevance_search(TEXTS[2], 3, 5, 0.1),
            lambda s: s.max_marginal_relevance_search_by_vector(VECTOR, 2, filter={"page": 1}),
            lambda s: s.get_by_ids(["a", "f", "nobody"]),
            lambda s: s.search(TEXTS[2], "mmr", k=2),
            lambda s: s.as_retriever(search_kwargs={"k": 2}).invoke(TEXTS[2]),
            lambda s: s.as_retriever(search_type="mmr").invoke(TEXTS[2]),
            lambda s: asyncio.run(s.asimilarity_search(TEXTS[2], k=3)),
            lambda s: asyncio.run(s.amax_marginal_relevance_search(TEXTS[2], k=3)),
            lambda s: asyncio.run(s.as_retriever().ainvoke(TEXTS[2])),
        ],
    )  # fmt: skip
    def test_finds_what_upstream_finds_and_shows_no_key(
        self, both: tuple[SamKVChroma, Chroma], search: Callable[[Any], list[Any]]
    ) -> None:
        ours, theirs = map(search, both)
        assert ours == theirs
        assert ours
        assert all(set(each.metadata) == {"page"} for each in documents_of(ours))

    def test_records_that_others_wrote(self, store: SamKVChroma, engine: Engine) -> None:
        store.kv_link.collection.add(ids=["r"], documents=[TEXTS[0]], embeddings=[VECTOR])
        ChromaLink(store.kv_link.collection, engine).add(["l"], TEXTS[1:2], [VECTOR])
        for found in (store.get_by_ids(["r", "l"]), store.similarity_search("x")):
            assert {(each.id, each.page_content) for each in found} == {
                ("r", TEXTS[0]),
                ("l", TEXTS[1]),
            }
            assert not any(each.metadata for each in found)
        assert store.get_by_ids([]) == []
        assert [each.id for each in store.get_by_ids(["r", "r"])] == ["r"]

    def test_mistakes(self, both: tuple[SamKVChroma, Chroma]) -> None:
        for use in (
            lambda: both[0].similarity_search("x", k=0),
            lambda: both[0].similarity_search("x", kk=1),
            lambda: both[0].similarity_search("x", filter={"page": {"$nothing": 1}}),
            lambda: both[0].max_marginal_relevance_search_by_vector([1.0]),
        ):
            with pytest.raises(InvalidOption, match="collection 'ours' refused the query"):
                use()
        for wrong in ({"ids": ["a", "a"]}, {"where": {"page": {"$no": 1}}}, {"include": ["x"]}):
            with pytest.raises(InvalidOption, match="collection 'ours' refused to be read"):
                both[0].get(**wrong)

    def test_hybrid_search_shows_no_key(
        self, store: SamKVChroma, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metadata = {"page": 1, KEY_FIELD: "0" * 32}
        columns = {"ids": [["a"]], "documents": [["x"]], "metadatas": [[metadata]]}
        result = SearchResult({**columns, "embeddings": [None], "scores": [None]})
        monkeypatch.setattr(Collection, "search", lambda self, search: result)
        (found,) = store.hybrid_search(chromadb.Search())
        assert found.metadata == {"page": 1}


class TestComponent:
    def test_an_existing_collection_without_its_embedding_function(
        self, engine: Engine, store: SamKVChroma
    ) -> None:
        client_of(store).create_collection("theirs")  # Chroma attaches its own
        opened = SamKVChroma(
            "theirs", Letters(), client=client_of(store), engine=engine,
            create_collection_if_not_exists=False,
        )  # fmt: skip
        assert opened.kv_link.collection._embedding_function is None
        with pytest.raises(InvalidOption, match="Chroma cannot open collection 'nobody'"):
            SamKVChroma(
                "nobody", client=client_of(store), engine=engine,
                create_collection_if_not_exists=False,
            )  # fmt: skip

    def test_a_database_that_is_open_in_another_way(self, engine: Engine, tmp_path: Path) -> None:
        theirs = Chroma("town", Letters(), str(tmp_path / "chroma"))
        theirs.add_texts(TEXTS[:2], ids=["a", "b"])
        with pytest.raises(InvalidOption, match="give that client as client=.*different settings"):
            open_store(engine, tmp_path)
        ours = SamKVChroma("town", Letters(), client=client_of(theirs), engine=engine)
        assert ours.kv_link.sync().n_cached == 2
        assert_in_step(ours, *TEXTS[:2])


class TestAcrossFrameworks:
    """One collection, one folder of caches, LlamaIndex on one side and LangChain on the other."""

    @pytest.fixture
    def index(self, engine: Engine, tmp_path: Path) -> Any:
        samkv = pytest.importorskip("llama_index.vector_stores.samkv")
        return samkv.SamKVChromaVectorStore.from_params(
            "town", persist_dir=str(tmp_path / "chroma"), engine=engine
        )

    @pytest.fixture
    def chroma(self, engine: Engine, tmp_path: Path) -> SamKVChroma:
        return SamKVChroma("town", OfflineEmbeddings(), str(tmp_path / "chroma"), engine=engine)

    @staticmethod
    def nodes(*texts: str) -> list[Any]:
        schema = pytest.importorskip("llama_index.core.schema")
        vectors = OfflineEmbeddings().embed_documents(list(texts))
        return [
            schema.TextNode(id_=f"n{n}", text=text, embedding=vector, metadata={"page": n})
            for n, (text, vector) in enumerate(zip(texts, vectors, strict=True))
        ]

    @staticmethod
    def answered_from_caches(engine: Engine, texts: list[str]) -> None:
        prompt = "\n\n".join(("Documents:", *texts, f"Question: {RECORDS[0].question}\nAnswer:"))
        answer = engine.generate(prompt, max_new_tokens=8)
        assert answer.report.found == len(texts) and not answer.report.chunk_misses
        assert RECORDS[0].workers in answer.text

    def test_langchain_reads_what_llama_index_wrote(
        self, index: Any, chroma: SamKVChroma, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.add(self.nodes(*TEXTS[:3]))
        forbid_prefill(monkeypatch)
        found = chroma.similarity_search(RECORDS[0].question, k=3)
        assert found[0].page_content == TEXTS[0] and found[0].metadata["page"] == 0
        assert not any(KEY_FIELD in each.metadata for each in found)
        assert_in_step(chroma, *TEXTS[:3])
        self.answered_from_caches(engine, [each.page_content for each in found])
        chroma.add_documents([doc("again", TEXTS[0])])  # the cache is there
        assert_in_step(chroma, *TEXTS[:3], TEXTS[0])
        chroma.delete(["n0", "n1"])
        assert_in_step(chroma, TEXTS[2], TEXTS[0])
        assert {each.node_id for each in index.get_nodes()} == {"again", "n2"}

    def test_llama_index_reads_what_langchain_wrote(
        self, index: Any, chroma: SamKVChroma, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        types = pytest.importorskip("llama_index.core.vector_stores.types")
        schema = pytest.importorskip("llama_index.core.schema")
        chroma.add_texts(TEXTS[:3], [{"page": n} for n in range(3)], ["a", "b", "c"])
        forbid_prefill(monkeypatch)
        vector = OfflineEmbeddings().embed_query(RECORDS[0].question)
        query = types.VectorStoreQuery(query_embedding=vector, similarity_top_k=3)
        found = index.query(query).nodes
        texts = [each.get_content(schema.MetadataMode.NONE) for each in found]
        assert texts[0] == TEXTS[0] and set(texts) == set(TEXTS[:3])
        assert found[0].get_content(schema.MetadataMode.LLM) == f"page: 0\n\n{TEXTS[0]}"
        assert_in_step(chroma, *TEXTS[:3])
        self.answered_from_caches(engine, texts)
        index.add(self.nodes(*TEXTS[:2]))
        assert_in_step(chroma, *TEXTS[:3], *TEXTS[:2])
        index.delete_nodes(["a", "b", "c"])
        assert_in_step(chroma, *TEXTS[:2])


def _not_called(*arguments: object) -> None:
    raise AssertionError("nothing should have been computed")

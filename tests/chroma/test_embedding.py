"""Learned embeddings, from where they come, and the fusion of their ranking with that of words."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import Database, open_collection
from samkv_integrations.chroma.embedding import (
    EmbeddingName,
    Embeddings,
    LearnedEmbedding,
    fused,
    open_remembering,
)
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.errors import EmbeddingFailed, InvalidOption, MissingExtra, ModelNotFound
from tests.support.chroma_link import client_of
from tests.support.embedding_server import EmbeddingServer, embedding_server, vector
from tests.support.records import builtin

TEXTS = [
    "The ferries from Delford cross the strait in forty minutes.",
    "The museum of Zenoburg shows old maps.",
    "Lena Harman directs the harbour of Delford.",
]


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with embedding_server() as served:
        yield served


def of(server: EmbeddingServer, key: str | None = None) -> LearnedEmbedding:
    return LearnedEmbedding(EmbeddingName.given("tiny", server.url), key)


class Meanings:
    """An embedding without a server. asked: the texts that it has embedded."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self.asked += texts
        return [vector(text) for text in texts]

    def embed_question(self, question: str) -> list[float]:
        return vector(question)


# -- fusion -------------------------------------------------------------------------------------


def test_reciprocal_ranks_of_a_known_case() -> None:
    found = fused(["a", "b", "c"], ["c", "d"])
    assert [*found] == ["c", "a", "b", "d"]
    assert found["c"] == pytest.approx(1 / 63 + 1 / 61)
    assert found["d"] == found["b"] == pytest.approx(1 / 62)


ids = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(first=ids, second=ids)
def test_fusion_is_the_papers_sum(first: list[str], second: list[str]) -> None:
    found = fused(first, second)
    for id_, score in found.items():
        ranks = [ranking.index(id_) + 1 for ranking in (first, second) if id_ in ranking]
        assert score == pytest.approx(sum(1 / (60 + rank) for rank in ranks))
    assert set(found) == {*first, *second}
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert [*fused(first, first)] == [*fused(first)] == first


# -- search -------------------------------------------------------------------------------------


@pytest.fixture
def link(tmp_path: Path) -> ChromaLink:
    collection = open_collection(tmp_path / "chroma", "town", create=True)
    made = ChromaLink(collection, Engine(builtin(), ChunkStore(tmp_path / "kv")), Meanings())
    add(made, *TEXTS)
    return made


def add(link: ChromaLink, *texts: str) -> None:
    ids = [str(number) for number in range(len(texts))]
    link.add(ids, texts, link.vectors(ids, texts))


def found(link: ChromaLink, question: str, k: int = 3) -> list[str]:
    return [one.text for one in link.search(question, k)]


def test_a_paraphrase_without_a_shared_word_is_found(link: ChromaLink) -> None:
    assert found(link, "Which gallery?")[0] == TEXTS[1]
    link.embedding = None
    assert found(link, "Which gallery?")[0] == TEXTS[0]  # the first record


def test_what_both_rankings_have_comes_first(link: ChromaLink) -> None:
    hits = link.search("Which port is in Delford?", 3)
    # words: 2 and 0, in an order of BM25's; vectors: 2, then the others
    assert hits[0].id == "2"
    assert hits[0].distance == pytest.approx(-2 / 61)
    assert [hit.distance for hit in hits] == sorted(hit.distance for hit in hits)
    assert len({hit.id for hit in hits}) == 3
    assert len(link.search("Which port is in Delford?", 1)) == 1


def test_records_that_others_change_or_delete(link: ChromaLink) -> None:
    assert found(link, "vessel")[0] == TEXTS[0]
    link.collection.update(ids=["0"], documents=["Basalt."], embeddings=[vector("gallery")])
    assert found(link, "Delford ferries")[0] == TEXTS[2]
    assert "Basalt." in found(link, "gallery")
    link.collection.delete(ids=["0"])
    assert set(found(link, "ferry")) == {*TEXTS[1:]}
    link.collection.add(ids=["9"], embeddings=[vector("ferry")])  # has no text
    assert set(found(link, "ferry")) == {*TEXTS[1:]}
    assert len(found(link, "ferry", 1)) == 1


def test_unchanged_records_keep_their_vectors(link: ChromaLink) -> None:
    embedding = link.embedding
    assert isinstance(embedding, Meanings) and embedding.asked == TEXTS
    changed = [TEXTS[0], "The gallery of Zenoburg.", "The gallery of Zenoburg.", TEXTS[1]]
    vectors = link.vectors(["0", "1", "8", "9"], changed)
    assert np.allclose(vectors, [vector(text) for text in changed])
    # record 9 is new; each text is embedded once
    assert embedding.asked[3:] == ["The gallery of Zenoburg.", TEXTS[1]]


def test_another_dimension_is_refused(link: ChromaLink) -> None:
    class Longer(Meanings):
        def embed_question(self, question: str) -> list[float]:
            return [*super().embed_question(question), 1.0]

    link.embedding = Longer()
    with pytest.raises(InvalidOption, match="dimension"):
        link.search("ferry", 2)


# -- what a collection remembers ----------------------------------------------------------------


def test_other_metadata_of_a_collection_stay(tmp_path: Path, server: EmbeddingServer) -> None:
    database, embedding = Database(tmp_path / "chroma"), of(server)
    fields = {"samkv_embedding": "tiny", "samkv_embedding_url": server.url}
    made = database.collection("town", create=True)
    made.modify(metadata={"owner": "us"})
    made.add(ids=["0"], documents=["Basalt."], embeddings=[[1.0] * 9])
    made.delete(ids=["0"])  # its dimension stays
    opened = open_remembering(database, "town", embedding)
    assert opened.metadata == {"owner": "us", **fields}
    opened.add(ids=["0"], documents=["Basalt."], embeddings=embedding.embed(["Basalt."]))
    moved = LearnedEmbedding(EmbeddingName.given("tiny", "http://elsewhere:1/v1/"))
    open_remembering(database, "town", moved)
    again = database.collection("town")
    assert again.metadata == {
        "owner": "us",
        **fields,
        "samkv_embedding_url": "http://elsewhere:1/v1",
    }
    assert again.count() == 1
    assert open_remembering(database, "town", None).metadata == again.metadata


def test_a_collection_keeps_its_distance(tmp_path: Path, server: EmbeddingServer) -> None:
    database, embedding = Database(tmp_path / "chroma"), of(server)
    first = database.collection("first", create=True)
    client_of(first).create_collection("town", metadata={"hnsw:space": "cosine"})
    opened = open_remembering(database, "town", embedding)
    opened.add(ids=["0"], documents=["Basalt."], embeddings=embedding.embed(["Basalt."]))
    moved = LearnedEmbedding(EmbeddingName.given("tiny", "http://elsewhere:1/v1/"))
    opened = open_remembering(database, "town", moved)
    assert opened.metadata["samkv_embedding_url"] == "http://elsewhere:1/v1"
    assert database.collection("town").configuration_json["hnsw"]["space"] == "cosine"


def test_an_embedding_is_loaded_once(tmp_path: Path, server: EmbeddingServer) -> None:
    database, embeddings = Database(tmp_path / "chroma"), Embeddings("tiny", server.url)
    for name in ("one", "two"):
        open_remembering(database, name, embeddings.to_ingest(database, name))
    both = [Embeddings().of(database.collection(name)) for name in ("one", "two")]
    assert [one.name for one in both if one] == [EmbeddingName(model="tiny", url=server.url)] * 2
    shared = Embeddings()
    assert shared.of(database.collection("one")) is shared.of(database.collection("two"))


# -- an endpoint --------------------------------------------------------------------------------


def test_an_endpoint_gets_batches_and_gives_unit_vectors(server: EmbeddingServer) -> None:
    texts = [f"{word} {number}" for number in range(50) for word in ("boat", "gallery", "\ud800")]
    vectors = np.array(of(server).embed(texts))
    assert [len(body["input"]) for body in server.requests] == [64, 64, 22]
    assert {body["model"] for body in server.requests} == {"tiny"}
    expected = np.array([vector(text) for text in texts])
    assert np.allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True))
    assert of(server).embed([]) == []


def test_a_key_is_sent_where_the_user_says_alone(
    tmp_path: Path, server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    database, given = Database(tmp_path / "chroma"), Embeddings("tiny", server.url)
    collection = open_remembering(database, "town", given.to_ingest(database, "town"))
    assert server.keys.pop() == "Bearer sk-secret"

    def asks(embeddings: Embeddings) -> str | None:
        embedding = embeddings.of(collection)
        assert embedding is not None
        embedding.embed_question("ferry")
        return server.keys.pop()

    assert asks(Embeddings()) is None  # whoever writes the collection names the URL
    assert asks(Embeddings(None, server.url + "/")) == "Bearer sk-secret"
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    assert asks(Embeddings()) == "Bearer sk-secret"


def test_a_key_that_is_none_is_not_shown(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = Database(tmp_path / "chroma")
    for key in ("sk-secret\nsk-other", "sk-secrét"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(InvalidOption, match="visible ASCII") as raised:
            Embeddings("tiny", server.url).to_ingest(database, "town")
        assert "sk-" not in str(raised.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")  # as a file's content ends
    Embeddings("tiny", server.url).to_ingest(database, "town")
    assert server.keys == ["Bearer sk-secret"]


def rows(*embeddings: object) -> tuple[int, object]:
    return 200, {"data": [{"index": at, "embedding": one} for at, one in enumerate(embeddings)]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {"error": "wrong key sk-secret!"}), "status 401.*set OPENAI_API_KEY to a key"),
        ((404, {"error": "no model"}), "'tiny' with status 404.*no model.*one of its models"),
        ((429, {}), "429.*try again later"),
        ((500, b"broken"), "500: broken; see its log"),
        ((302, b""), "302"),
        ((200, b"<html>"), "something else than OpenAI's embeddings.*/v1"),
        ((200, {"data": [{"index": 0}]}), "something else"),
        ((200, {"data": ["text", "text"]}), "something else"),
        (rows(), "no vector"),
        (rows([1.0]), "no vector"),
        (rows([], []), "no vector"),
        (rows([1.0, 2.0], [1.0]), "no vector"),
        (rows(["a"], ["b"]), "no vector"),
        (rows([1.0], [float("nan")]), "no vector"),
        (rows([1.0], [1e300]), "no vector"),
        ((200, b'{"data": ' + b"[" * 100_000), "something else"),
        ((200, b" " * (2**25 + 1)), "more than 33554432 bytes for 2 texts"),
        ((500, b" " * (2**25 + 1)), "more than 33554432 bytes for 2 texts"),
    ],
)  # fmt: skip
def test_what_an_endpoint_may_return(
    server: EmbeddingServer, answer: tuple[int, object], said: str
) -> None:
    server.answer = lambda texts: answer
    with pytest.raises(EmbeddingFailed, match=said) as raised:
        of(server, "sk-secret").embed(["a", "b"])
    assert "sk-secret" not in str(raised.value)


def test_a_compressed_response_is_not_unpacked(server: EmbeddingServer) -> None:
    server.headers = {"content-encoding": "gzip"}
    server.answer = lambda texts: (200, gzip.compress(json.dumps(rows([1.0])[1]).encode()))
    with pytest.raises(EmbeddingFailed, match="something else"):
        of(server).embed(["a"])


def test_an_endpoint_without_a_key_says_where_it_is_sent(server: EmbeddingServer) -> None:
    server.answer = lambda texts: (401, {})
    with pytest.raises(EmbeddingFailed, match="--embedding-url or OPENAI_BASE_URL"):
        of(server).embed(["a"])


def test_an_endpoint_that_is_not_there() -> None:
    with embedding_server() as gone:
        pass
    with pytest.raises(EmbeddingFailed, match="does not answer .*; start it"):
        of(gone).embed_question("a")


@pytest.mark.parametrize(
    "url",
    ["localhost:11434", "ftp://host/v1", "http://", "http://me:pass@host/v1", "http://h/v1?key=1",
     "http://h:99999/v1", ""],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidOption, match="give http://HOST:PORT/v1 without user") as raised:
        Embeddings("tiny", url)
    assert "pass@" not in str(raised.value)


# -- local models -------------------------------------------------------------------------------


def saved_static(folder: Path) -> Path:
    """A sentence-transformers model: a row of a table for each word, and their mean."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"[UNK]": 0, "boat": 1, "ferry": 2, "gallery": 3, "find": 4, ":": 5}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    table = np.array([[0, 0, 1], [2, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 9], [0, 0, 9]], np.float32)
    module = StaticEmbedding(tokenizer, embedding_weights=table)
    model = SentenceTransformer(modules=[module], prompts={"query": "find: "}, device="cpu")
    model.save(str(folder))
    return folder


def test_a_folder_of_sentence_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_static(tmp_path / "static")
    monkeypatch.chdir(tmp_path)
    name = EmbeddingName.given("static", None)
    assert name.model == str(tmp_path / "static")
    embedding = LearnedEmbedding(name)
    texts = ["boat boat", "ferry", "gallery", "\ud800"]
    assert np.allclose(embedding.embed(texts), [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    question = embedding.embed_question("boat")  # with the model's prompt for questions
    assert question[2] > question[0] > 0 and np.isclose(np.linalg.norm(question), 1)
    threads = [Thread(target=embedding.embed, args=(texts * 50,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert embedding.embed_question("boat") == question


@pytest.mark.parametrize("model", ["./not-there", "/not/there", "~nobody", ""])
def test_a_folder_that_is_none(model: str) -> None:
    with pytest.raises(ModelNotFound, match="is not a folder; give 'chroma', a sentence-trans"):
        Embeddings(model)


def test_a_folder_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder = saved_static(tmp_path / "static")
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "modeling_own.Own"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        LearnedEmbedding(EmbeddingName(model=str(folder))).embed(["a"])
    assert not (tmp_path / "ran").exists()


def test_models_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="empty' cannot be loaded: .*; give 'chroma'"):
        LearnedEmbedding(EmbeddingName(model=str(tmp_path / "empty"))).embed(["a"])
    with pytest.raises(ModelNotFound, match="gone of the collection's embedding is not here"):
        LearnedEmbedding(EmbeddingName(model=str(tmp_path / "gone"))).embed(["a"])
    loading = "samkv_integrations.runtimes.transformers.loading"
    monkeypatch.setattr(f"{loading}.hub_answers", lambda: False)
    with pytest.raises(ModelNotFound, match="'no-one/no-model' cannot be loaded"):
        LearnedEmbedding(EmbeddingName(model="no-one/no-model")).embed(["a"])


def test_chromas_model_that_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chromadb.utils.embedding_functions import ONNXMiniLM_L6_V2

    def fail(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(ONNXMiniLM_L6_V2, "DOWNLOAD_PATH", tmp_path / "cache")
    monkeypatch.setattr(httpx, "stream", fail)
    with pytest.raises(ModelNotFound, match="no network; it is downloaded once, into .*cache"):
        LearnedEmbedding(EmbeddingName(model="chroma")).embed(["a"])


def test_chromas_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from chromadb.utils.embedding_functions import ONNXMiniLM_L6_V2

    def call(self: object, input: list[str]) -> list[Any]:
        return [np.array([3.0, 4.0], np.float32) for _ in input]

    monkeypatch.setattr(ONNXMiniLM_L6_V2, "__call__", call)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    embedding = LearnedEmbedding(EmbeddingName.given("chroma", None))
    assert np.allclose(embedding.embed(["a", "b"]), [[0.6, 0.8]] * 2)
    assert np.allclose(embedding.embed_question("a"), [0.6, 0.8])
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"  # nothing is reported to onnxruntime's maker


@pytest.mark.parametrize(
    ("model", "package", "extra"),
    [("some/model", "sentence_transformers", "embedding"), ("chroma", "onnxruntime", "chroma")],
)
def test_packages_that_are_not_installed(
    model: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"'{package}' is not installed.*\[{extra}\]"):
        LearnedEmbedding(EmbeddingName(model=model)).embed(["a"])

"""The Chroma link: records and chunk caches go in together, and come out as they went in."""

from __future__ import annotations

import math
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chromadb.errors import InternalError

from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.chroma.client import KEY_FIELD, chroma_errors, open_collection
from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import Retrieved
from samkv_integrations.errors import (
    InvalidOption,
    MissingExtra,
)
from tests.support.chroma_link import VECTOR, any_bytes_of, client_of, link_of
from tests.support.records import RECORDS, TEXTS, builtin

IDS = [record.name for record in RECORDS]


@pytest.fixture
def link(tmp_path: Path) -> ChromaLink:
    engine = Engine(builtin(), ChunkStore(tmp_path / "kv"))
    return ChromaLink(open_collection(tmp_path / "chroma", "town", create=True), engine)


@pytest.fixture(scope="module")
def embedding() -> HashingEmbedding:
    return HashingEmbedding()


def records(link: ChromaLink) -> dict[str, tuple[str, dict[str, Any]]]:
    """id -> (document, metadata) of everything in the collection, as Chroma has it."""
    rows = link.collection.get(include=["documents", "metadatas"])
    return {
        id_: (document, metadata)
        for id_, document, metadata in zip(
            rows["ids"], rows["documents"], rows["metadatas"], strict=True
        )
    }


class TestAdd:
    def test_records_hold_the_given_text_the_given_metadata_and_the_key(
        self, link: ChromaLink, embedding: HashingEmbedding
    ) -> None:
        texts = [f"\n {TEXTS[0]} \n", TEXTS[1]]  # the first with white space that is no body
        rows = [{"source": "a.txt", "page": 3}, None]
        link.add(IDS[:2], texts, embedding.embed(texts), rows)
        keys = [link.engine.key_of(text) for text in texts]
        assert records(link) == {
            IDS[0]: (texts[0], {"source": "a.txt", "page": 3, KEY_FIELD: keys[0]}),
            IDS[1]: (texts[1], {KEY_FIELD: keys[1]}),
        }
        assert link.engine.store.keys(link.engine.fingerprint) == sorted(keys)

    def test_result_counts_what_was_computed(
        self, link: ChromaLink, embedding: HashingEmbedding
    ) -> None:
        first = link.add(IDS[:3], TEXTS[:3], embedding.embed(TEXTS[:3]))
        assert (first.n_records, first.n_cached, first.n_hit) == (3, 3, 0)
        assert first.bytes_on_disk == link.engine.store.stats().bytes > 0
        assert first.seconds > 0
        texts = [TEXTS[2], TEXTS[3], f" {TEXTS[3]} "]  # one known, one new, the new one again
        second = link.add(["x", "y", "z"], texts, embedding.embed(texts))
        assert (second.n_records, second.n_cached, second.n_hit) == (3, 1, 1)
        assert 0 < second.bytes_on_disk < first.bytes_on_disk

    def test_a_key_is_trusted_of_the_record_that_has_it_only(
        self, link: ChromaLink, embedding: HashingEmbedding
    ) -> None:
        """A key that another record still names, of its former text, verifies nothing."""
        engine = link.engine
        (key,) = Engine(builtin(), engine.store).cache_chunks(TEXTS[:1])
        damaged = engine.store.path / engine.fingerprint.digest / key[:2] / f"{key}.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 0xFF
        damaged.write_bytes(content)
        result = link.add(
            ["a", "b"], TEXTS[1::-1], embedding.embed(TEXTS[1::-1]), [{KEY_FIELD: key}, None]
        )
        assert (result.n_cached, result.n_hit) == (2, 0)
        assert engine.is_cached(TEXTS[0])

    def test_no_more_records_at_once_than_chroma_takes(
        self, link: ChromaLink, embedding: HashingEmbedding, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_of(link.collection), "get_max_batch_size", lambda: 4)
        sizes, upsert = [], link.collection.upsert

        def counted(*, ids: list[str], **rest: Any) -> None:
            sizes.append(len(ids))
            upsert(ids=ids, **rest)

        monkeypatch.setattr(link.collection, "upsert", counted)
        link.add(IDS, TEXTS, embedding.embed(TEXTS))
        assert sizes == [4, 2]
        assert {id_: text for id_, (text, _) in records(link).items()} == dict(
            zip(IDS, TEXTS, strict=True)
        )


class TestQuery:
    def test_nearest_first(self, link: ChromaLink, embedding: HashingEmbedding) -> None:
        rows = [{"place": place} for place in range(len(TEXTS))]
        link.add(IDS, TEXTS, embedding.embed(TEXTS), rows)
        for place, record in enumerate(RECORDS):
            found = link.query(embedding.embed([record.question])[0], 3)
            metadata = {"place": place, KEY_FIELD: link.engine.key_of(record.text)}
            assert found[0] == Retrieved(
                id=record.name, text=record.text, metadata=metadata, distance=found[0].distance
            )
            distances = [hit.distance for hit in found]
            assert len(found) == 3 and distances == sorted(distances)

    @pytest.mark.parametrize("vector", [[], [1.0], ["a"]])
    def test_what_is_no_vector_of_the_collection(self, link: ChromaLink, vector: Any) -> None:
        link.add(IDS[:1], TEXTS[:1], [VECTOR])
        with pytest.raises(InvalidOption):
            link.query(vector, 3)


def test_what_another_process_deletes_is_left_out(
    link: ChromaLink, embedding: HashingEmbedding, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record is gone, and the index of this process still leads there."""
    link.add(IDS[:3], TEXTS[:3], embedding.embed(TEXTS[:3]))
    vector = embedding.embed(TEXTS[:1])[0]
    assert link.query(vector, 3)[0].id == IDS[0]
    code = (  # Chroma's own client: importing this package takes seconds more
        "import sys, chromadb; from chromadb.config import Settings;"
        "client = chromadb.PersistentClient(sys.argv[1], Settings(anonymized_telemetry=False));"
        "town = client.get_collection('town', embedding_function=None);"
        "town.delete(ids=[sys.argv[2]])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "chroma"), IDS[0]], check=True)
    assert {hit.id for hit in link.query(vector, 3)} == set(IDS[1:3])
    assert f"record {IDS[0]!r} of collection 'town' has no text and is left out" in caplog.text


class TestOpenCollection:
    def test_chroma_gets_no_embedding_function_and_sends_no_telemetry(self, tmp_path: Path) -> None:
        collection = open_collection(tmp_path, "town", create=True)
        assert collection._embedding_function is None
        assert not client_of(collection).get_settings().anonymized_telemetry

    def test_asking_creates_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidOption, match="no Chroma database; ingest"):
            open_collection(tmp_path / "chroma", "town", create=False)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("code", [8, 13, 778])
    def test_a_disk_that_takes_nothing_is_named_with_the_next_step(self, code: int) -> None:
        """Read-only, full, or a limit of the process; Chroma says no more than this."""
        with (
            pytest.raises(InvalidOption, match=rf"town: .*{code}.*make room or allow access"),
            chroma_errors("cannot open town"),
        ):
            raise InternalError(f"error returned from database: (code: {code}) attempt to write")


def test_caches_inside_chromas_folder_are_refused(tmp_path: Path) -> None:
    collection = open_collection(tmp_path / "chroma", "town", create=True)
    inside = Engine(builtin(), ChunkStore(tmp_path / "chroma" / "kv"))
    with pytest.raises(InvalidOption, match=r"lie inside Chroma's folder.*chroma-kv"):
        ChromaLink(collection, inside)
    beside = ChunkStore(tmp_path / "chroma-kv")  # shares the beginning of its name, and is fine
    for store in (beside, MemoryStore()):
        assert ChromaLink(collection, Engine(builtin(), store)).collection is collection


class TestHashingEmbedding:
    def test_unit_vectors_that_depend_on_words_alone(self, embedding: HashingEmbedding) -> None:
        one, shouted, other = embedding.embed(["The pale brook", "THE pale, brook!", "iron"])
        assert one == shouted != other
        assert len(one) == 1024 and math.isclose(math.hypot(*one), 1, rel_tol=1e-9)

    def test_same_as_ever(self) -> None:
        # Vectors of a collection must fit the questions of later processes and releases.
        (vector,) = HashingEmbedding().embed(["pale brook mill"])
        signs = {at: math.copysign(1, value) for at, value in enumerate(vector) if value}
        assert signs == {573: -1, 634: 1, 738: -1, 829: -1, 984: 1}


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("chromadb", lambda: open_collection("nowhere", "town", create=True)),
        ("mmh3", HashingEmbedding),
    ],
)
def test_missing_package_names_the_extra(
    module: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what import does if it is not installed
    with pytest.raises(MissingExtra, match=r"pip install '.\[chroma\]'"):
        use()


class TestNothingIsLeft:
    """Of texts that were deleted, anywhere in the folder of the store."""

    @pytest.mark.parametrize("way", ["delete", "clear", "replace", "sync", "forget"])
    def test_of_a_text(
        self, link: ChromaLink, embedding: HashingEmbedding, way: str, tmp_path: Path
    ) -> None:
        link.add(IDS[:3], TEXTS[:3], embedding.embed(TEXTS[:3]))
        other_model = Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=16)
        other_model.cache_chunks(TEXTS[:2])
        assert any_bytes_of(link, TEXTS[0])
        if way == "delete":
            link.delete(IDS[:1])
        elif way == "clear":
            link.clear()
        elif way == "replace":
            link.add(IDS[:1], TEXTS[4:5], embedding.embed(TEXTS[4:5]))
        else:
            link.collection.delete(ids=IDS[:1])
            link.engine.forget(TEXTS[:1]) if way == "forget" else link.sync(grace_s=0)
        assert not any_bytes_of(link, TEXTS[0])
        assert bool(any_bytes_of(link, TEXTS[1])) == (way != "clear")
        assert other_model.is_cached(TEXTS[1]) == (way != "clear")

    def test_a_cache_of_another_model_that_a_record_needs(
        self, link: ChromaLink, embedding: HashingEmbedding, tmp_path: Path
    ) -> None:
        other = Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=16)
        theirs = ChromaLink(open_collection(tmp_path / "chroma", "country", create=True), other)
        for one in (link, theirs):
            one.add(IDS[:1], TEXTS[:1], embedding.embed(TEXTS[:1]))
        assert link.clear() == 1
        assert not link.engine.is_cached(TEXTS[0]) and other.is_cached(TEXTS[0])
        assert theirs.clear() == 1
        assert not any_bytes_of(link, TEXTS[0])

    @pytest.mark.slow
    def test_of_chroma_s_own_file_when_it_is_vacuumed(
        self, link: ChromaLink, embedding: HashingEmbedding, tmp_path: Path
    ) -> None:
        """As docs/security.md says; a log of the last writes is all that keeps a text."""
        link.add(IDS[:3], TEXTS[:3], embedding.embed(TEXTS[:3]))
        client_of(link.collection).delete_collection("town")
        chroma = Path(sysconfig.get_path("scripts")) / "chroma"
        vacuum = [str(chroma), "vacuum", "--path", str(tmp_path / "chroma"), "--force"]
        done = subprocess.run(vacuum, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        held = [f for f in (tmp_path / "chroma").rglob("*") if f.is_file()]
        assert held and not [f for f in held if TEXTS[0].encode()[10:40] in f.read_bytes()]


def test_records_of_chunks_that_another_process_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed, nor read, and what is not there is left so."""
    link = link_of(tmp_path)
    texts = [record.text for record in RECORDS[:3]]
    Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8).cache_chunks(texts[:2])

    def refused(*arguments: Any) -> None:
        raise AssertionError("a cache was opened")

    monkeypatch.setattr(ChunkStore, "open", refused)
    done = link.add(IDS[:3], texts, [VECTOR] * 3, build_missing=False)
    assert (done.n_records, done.n_cached, done.n_hit, done.bytes_on_disk) == (3, 0, 2, 0)
    rows = link.collection.get(include=["metadatas"])["metadatas"]
    assert [row[KEY_FIELD] for row in rows] == [link.engine.key_of(text) for text in texts]
    assert not link.engine.store.contains(link.engine.key_of(texts[2]), link.engine.fingerprint)

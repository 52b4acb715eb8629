"""The index of words: it finds what shares rare words, and follows the records."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromadb.errors import InternalError
from hypothesis import given, settings
from hypothesis import strategies as st

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.words import FOLDER, WordIndex
from samkv_integrations.errors import EmptyInput, InvalidOption
from tests.support.records import builtin

TEXTS = [
    "The ferries from Delford cross the strait in forty minutes.",
    "The museum of Zenoburg shows old maps, and what the museum paid for them.",
    "Lena Harman directs the harbour of Delford.",
]


def link_in(folder: Path, name: str = "town") -> ChromaLink:
    engine = Engine(builtin(), ChunkStore(folder / "kv"))
    return ChromaLink(open_collection(folder / "chroma", name, create=True), engine)


def add(link: ChromaLink, *texts: str, first: int = 0) -> None:
    ids = [str(first + number) for number in range(len(texts))]
    link.add(ids, texts, HashingEmbedding().embed(texts))


def found(link: ChromaLink, question: str, k: int = 5) -> list[str]:
    return [one.text for one in link.search(question, k)]


@pytest.fixture
def link(tmp_path: Path) -> ChromaLink:
    made = link_in(tmp_path)
    add(made, *TEXTS)
    return made


def test_rare_words_count_and_words_are_stemmed(link: ChromaLink) -> None:
    assert found(link, "How long does the ferry take?")[:1] == TEXTS[:1]
    assert found(link, "Which maps did the museum show?") == [TEXTS[1]]
    assert found(link, "Who is the director of the harbour in Delford?")[0] == TEXTS[2]
    hits = link.search("Delford harbour", 2)
    assert [hit.id for hit in hits] == ["2", "0"]
    assert hits[0].distance < hits[1].distance
    assert len(link.search("Delford", 1)) == 1


@pytest.mark.parametrize(
    ("first", "second", "question"),
    [
        ("渡轮从德福港出发，四十分钟过海峡。", "博物馆展出古老的地图。", "哪里展出地图？"),
        ("フェリーは四十分で海峡を渡る。", "博物館は古い地図を見せる。", "地図はどこですか"),
        ("연락선은 사십 분이면 해협을 건넌다.", "박물관에서 옛 지도를 보여준다.", "지도는 어디에?"),
        ("เรือข้ามฟากใช้เวลาสี่สิบนาที", "พิพิธภัณฑ์แสดงแผนที่เก่า", "แผนที่อยู่ที่ไหน"),
        ("नाव जलसन्धि पार करती है।", "संग्रहालय पुराने मानचित्र दिखाता है।", "मानचित्र कहाँ हैं?"),
    ],
)
def test_words_are_found_in_every_script(
    tmp_path: Path, first: str, second: str, question: str
) -> None:
    link = link_in(tmp_path)
    add(link, first, second)
    assert found(link, question)[0] == second
    link.delete(["1"])
    assert second not in found(link, question)


def test_without_a_shared_word_the_first_records_are_found(link: ChromaLink) -> None:
    assert found(link, "xyzzy?", 2) == TEXTS[:2]
    assert found(link, "?!", 2) == TEXTS[:2]
    assert found(link, "what is the", 2)  # stop words alone are looked up


def test_records_are_followed(link: ChromaLink) -> None:
    assert found(link, "xyzzy quartz") == TEXTS  # makes the index
    add(link, "Quartz is mined in the hills.", first=3)
    assert found(link, "quartz") == ["Quartz is mined in the hills."]
    add(link, "Granite is mined in the hills.", first=3)
    assert found(link, "granite") == ["Granite is mined in the hills."]
    assert found(link, "quartz") != ["Quartz is mined in the hills."]
    link.delete(["3"])
    assert found(link, "granite hills") == TEXTS
    link.clear()
    with pytest.raises(EmptyInput, match="is empty"):
        link.search("granite", 3)


def test_what_other_clients_change_is_noticed(link: ChromaLink) -> None:
    found(link, "ferry")
    link.collection.upsert(
        ids=["0", "9"], documents=["Trams cross the bridge.", "Basalt is dark."],
        embeddings=HashingEmbedding().embed(["", ""]),
    )  # fmt: skip
    assert found(link, "basalt") == ["Basalt is dark."]
    link.collection.update(
        ids=["9"], documents=["Chalk is white."], embeddings=HashingEmbedding().embed([""])
    )
    assert "Basalt is dark." not in found(link, "basalt")
    assert found(link, "chalk") == ["Chalk is white."]
    link.collection.delete(ids=["9"])
    assert "Chalk is white." not in found(link, "chalk")


def test_sync_repairs_what_was_not_noticed(link: ChromaLink) -> None:
    found(link, "ferry")
    link.collection.update(
        ids=["1"], documents=["Basalt is dark."], embeddings=HashingEmbedding().embed([""])
    )
    link.sync(grace_s=0)
    assert found(link, "basalt") == ["Basalt is dark."]


def test_an_interruption_while_records_are_written(
    link: ChromaLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that has not opened the index."""
    found(link, "ferry")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WordIndex, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            add(link_in(tmp_path), "Basalt is dark.", first=1)
    assert found(link, "basalt") == ["Basalt is dark."]


def test_an_error_of_chroma_is_no_damage(
    link: ChromaLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(link, "ferry")
    link.collection.add(ids=["9"], documents=["Basalt."], embeddings=HashingEmbedding().embed([""]))
    before = [*(tmp_path / "kv" / FOLDER).rglob("*.sqlite")]

    def fail(*_: object, **__: object) -> None:
        raise InternalError("gone away")

    with monkeypatch.context() as patched:
        patched.setattr("chromadb.Collection.get", fail)
        with pytest.raises(InvalidOption, match="gone away"):
            link.search("basalt", 3)
    assert [*(tmp_path / "kv" / FOLDER).rglob("*.sqlite")] == before
    assert found(link, "basalt") == ["Basalt."]


def test_records_without_a_text_are_never_found(tmp_path: Path) -> None:
    made = link_in(tmp_path)
    made.collection.add(ids=["a", "b"], embeddings=HashingEmbedding().embed(["", ""]))
    assert made.search("ferry", 3) == []


def test_another_process_shares_the_index(link: ChromaLink, tmp_path: Path) -> None:
    found(link, "ferry")
    other = link_in(tmp_path)
    add(other, "Quartz is mined in the hills.", first=3)
    assert found(link, "quartz") == ["Quartz is mined in the hills."]


def test_a_collection_finds_its_own_records(link: ChromaLink, tmp_path: Path) -> None:
    other = link_in(tmp_path, "other")
    add(other, "The ferry of another town is slow.")
    assert found(link, "ferry")[:1] == TEXTS[:1]
    assert found(other, "ferry") == ["The ferry of another town is slow."]


def test_a_damaged_or_deleted_index_is_made_anew(link: ChromaLink, tmp_path: Path) -> None:
    found(link, "ferry")
    (file,) = (tmp_path / "kv" / FOLDER).rglob("*.sqlite")
    link_in(tmp_path)
    file.unlink()
    assert found(link, "ferry")[:1] == TEXTS[:1]
    (file,) = (tmp_path / "kv" / FOLDER).rglob("*.sqlite")
    file.write_bytes(b"no database" * 1000)
    assert found(link_in(tmp_path), "ferry")[:1] == TEXTS[:1]
    (file,) = (tmp_path / "kv" / FOLDER).rglob("*.sqlite")
    content = bytearray(file.read_bytes())
    content[4096 : 4096 + 8192] = bytes(8192)  # a part of its tables
    file.write_bytes(content)
    assert found(link_in(tmp_path), "ferry")[:1] == TEXTS[:1]


def test_deleted_words_leave_the_file(link: ChromaLink, tmp_path: Path) -> None:
    add(link, "The password of Quibbletown is xylophonic.", first=3)
    assert found(link, "xylophonic")
    (file,) = (tmp_path / "kv" / FOLDER).rglob("*.sqlite")
    assert b"xylophon" in file.read_bytes()
    link.delete(["3"])
    assert b"xylophon" not in file.read_bytes()
    assert b"Quibbletown" not in file.read_bytes()


def test_the_index_of_a_deleted_collection_is_pruned(link: ChromaLink, tmp_path: Path) -> None:
    other = link_in(tmp_path, "other")
    add(other, "The ferry of another town is slow.")
    assert found(other, "ferry") and found(link, "ferry")
    other.collection._client.delete_collection(  # type: ignore[call-arg]
        "other", tenant=other.collection.tenant, database=other.collection.database
    )
    link.sync(grace_s=0)
    assert [folder.name for folder in (tmp_path / "kv" / FOLDER).glob("*/*")] == [
        str(link.collection.id)
    ]


def test_wrong_counts_are_refused(link: ChromaLink) -> None:
    with pytest.raises(InvalidOption, match="at least 1"):
        link.search("ferry", 0)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> ChromaLink:
    made = link_in(tmp_path_factory.mktemp("some"))
    add(made, *TEXTS)
    return made


@settings(max_examples=200, deadline=None)
@given(question=st.text(max_size=80))
def test_any_text_may_be_asked(question: str, some: ChromaLink) -> None:
    assert found(some, question, 3)

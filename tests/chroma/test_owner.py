"""One folder of caches serves one Chroma database; another is told so before it deletes any."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chromadb.config import Settings

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import connect_collection, open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.errors import InvalidOption, StoreError
from tests.support.chroma_link import VECTOR, client_of
from tests.support.chroma_server import HOST
from tests.support.records import TEXTS, builtin

QUIET = Settings(anonymized_telemetry=False)


def engine_of(kv: Path, namespace: str = "") -> Engine:
    return Engine(builtin(), ChunkStore(kv, namespace=namespace), block_size=8)


def link_of(folder: Path, kv: Path, *, namespace: str = "", name: str = "town") -> ChromaLink:
    return ChromaLink(open_collection(folder, name, create=True), engine_of(kv, namespace))


def in_memory(name: str) -> Any:
    return chromadb.EphemeralClient(settings=QUIET).get_or_create_collection(
        name, embedding_function=None
    )


def fill(link: ChromaLink, text: str = TEXTS[0]) -> set[str]:
    """Keys of what is cached then."""
    link.add(["a"], [text], [VECTOR])
    return set(link.engine.store.keys(link.engine.fingerprint))


def note_of(kv: Path) -> Path:
    (file,) = kv.glob("chroma-owner-*.json")
    return file


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    return tmp_path / "kv"


class TestAnotherDatabase:
    def test_two_folders_do_not_share_caches(self, tmp_path: Path, kv: Path) -> None:
        """The second one's `sync` deleted all caches of the first."""
        first = link_of(tmp_path / "one", kv)
        held = fill(first)
        with pytest.raises(InvalidOption, match="database .*one, and would be deleted.*namespace"):
            link_of(tmp_path / "two", kv).sync(grace_s=0)
        assert set(first.engine.store.keys()) == held
        assert first.sync(grace_s=0).n_pruned == 0

    def test_with_a_namespace_each_has_its_own(self, tmp_path: Path, kv: Path) -> None:
        first = link_of(tmp_path / "one", kv)
        second = link_of(tmp_path / "two", kv, namespace="two")
        keys = fill(first) | fill(second)
        assert len(keys) == 2
        for link in (first, second):
            assert link.sync(grace_s=0).n_pruned == 0
        assert {key for link in (first, second) for key in link.engine.store.keys()} == keys

    def test_tenants_of_one_folder_are_two_databases(self, tmp_path: Path, kv: Path) -> None:
        """Neither sees the records of the other."""
        folder = str(tmp_path / "one")
        settings = Settings(
            is_persistent=True, persist_directory=folder, anonymized_telemetry=False
        )
        admin = chromadb.AdminClient(settings)
        admin.create_tenant("other")
        admin.create_database("theirs", "other")
        options = {"tenant": "other", "database": "theirs"}
        mine, theirs = (
            chromadb.PersistentClient(folder, settings=settings, **given).create_collection(
                "town", embedding_function=None
            )
            for given in ({}, options)
        )
        ChromaLink(mine, engine_of(kv))
        with pytest.raises(InvalidOption, match="other/theirs"):
            ChromaLink(theirs, engine_of(kv))
        assert ChromaLink(theirs, engine_of(kv, "other")).collection is theirs

    def test_it_is_asked_again_before_anything_is_pruned(self, tmp_path: Path, kv: Path) -> None:
        """Here another process took the caches over, after the note was deleted."""
        link = link_of(tmp_path / "one", kv)
        held = fill(link)
        note = json.loads(note_of(kv).read_text())
        note_of(kv).write_text(
            json.dumps(note | {"database": str(tmp_path / "two"), "collections": ["x"]})
        )
        with pytest.raises(InvalidOption, match="database .*two, and would be deleted"):
            link.sync(grace_s=0)
        assert set(link.engine.store.keys()) == held
        assert link.sync(prune=False).n_records == 1

    def test_the_first_of_two_at_once_wins(
        self, tmp_path: Path, kv: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        note, raced = ChunkStore.note, []

        def absent_at_first(store: ChunkStore, name: str) -> str | None:
            if not raced:
                raced.append(link_of_other())
                return None
            return note(store, name)

        def link_of_other() -> ChromaLink:
            monkeypatch.setattr(ChunkStore, "note", note)
            made = link_of(tmp_path / "one", kv)
            monkeypatch.setattr(ChunkStore, "note", absent_at_first)
            return made

        collection = open_collection(tmp_path / "two", "town", create=True)
        monkeypatch.setattr(ChunkStore, "note", absent_at_first)
        with pytest.raises(InvalidOption, match="database .*one, and would be deleted"):
            ChromaLink(collection, engine_of(kv))
        assert len(raced) == 1


class TestTheSameDatabase:
    def test_its_collections_and_processes_share(self, tmp_path: Path, kv: Path) -> None:
        town = link_of(tmp_path / "one", kv)
        notes = link_of(tmp_path / "one", kv, name="notes")
        again = link_of(tmp_path / "one" / ".." / "one", kv)
        assert fill(town) < fill(notes, TEXTS[1])
        assert again.sync(grace_s=0).n_pruned == notes.sync(grace_s=0).n_pruned == 0
        listed = json.loads(note_of(kv).read_text())["collections"]
        assert listed == [str(link.collection.id) for link in (town, notes)]

    def test_moved_with_its_records(self, tmp_path: Path, kv: Path) -> None:
        held = fill(link_of(tmp_path / "one", kv))
        shutil.copytree(tmp_path / "one", tmp_path / "moved")
        (tmp_path / "one").rename(tmp_path / "away")
        link = link_of(tmp_path / "moved", kv)
        assert link.sync(grace_s=0).n_pruned == 0 and set(link.engine.store.keys()) == held
        assert json.loads(note_of(kv).read_text())["database"] == str(tmp_path / "moved")

    def test_copied_with_its_caches(self, tmp_path: Path) -> None:
        """As a project's folder is; the copy has a folder of caches to itself."""
        original = tmp_path / "project"
        held = fill(link_of(original / "chroma", original / "kv"))
        shutil.copytree(original, tmp_path / "copy")
        copied = link_of(tmp_path / "copy/chroma", tmp_path / "copy/kv")
        copied.delete(["a"])
        assert not copied.engine.store.keys()
        again = link_of(original / "chroma", original / "kv")
        assert again.sync(grace_s=0).n_pruned == 0 and set(again.engine.store.keys()) == held

    def test_the_error_says_how_to_succeed_one_that_is_gone(self, tmp_path: Path, kv: Path) -> None:
        fill(link_of(tmp_path / "one", kv))
        with pytest.raises(InvalidOption, match=f"gone for good, delete {note_of(kv)}"):
            link_of(tmp_path / "two", kv)
        note_of(kv).unlink()
        link = link_of(tmp_path / "two", kv)
        assert link.sync(grace_s=0).n_pruned == 1
        assert json.loads(note_of(kv).read_text())["collections"] == [str(link.collection.id)]

    def test_databases_in_memory_follow_each_other(self, tmp_path: Path, kv: Path) -> None:
        for name in ("first run", "second run"):
            collection = in_memory(name.replace(" ", "-"))
            link = ChromaLink(collection, engine_of(kv))
            held = fill(link)
            assert held and link.sync(grace_s=0).n_pruned == 0
            client_of(collection).delete_collection(collection.name)
        assert not list(kv.glob("chroma-owner-*"))
        assert fill(link_of(tmp_path / "one", kv)) == held  # and may end on disk

    def test_of_a_server(self, tmp_path: Path, kv: Path, chroma_port: int) -> None:
        """It has two addresses, and is no other one than it was."""
        names = ("owner-a", "owner-b")
        link = ChromaLink(connect_collection(HOST, chroma_port, names[0], True), engine_of(kv))
        held = fill(link)
        for address in (HOST, "localhost"):
            for name in names:
                collection = connect_collection(address, chroma_port, name, True)
                assert ChromaLink(collection, engine_of(kv)).sync(grace_s=0).n_pruned == 0
        assert set(link.engine.store.keys()) == held
        with pytest.raises(InvalidOption, match=f":{chroma_port}, and would be deleted.*delete .*"):
            link_of(tmp_path / "one", kv)
        for name in names:
            client_of(link.collection).delete_collection(name)


class TestTheNote:
    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"database": "x", "collections": 1}'],
    )  # fmt: skip
    def test_while_it_is_damaged_nothing_is_deleted(
        self, tmp_path: Path, kv: Path, content: bytes
    ) -> None:
        link = link_of(tmp_path / "one", kv)
        held = fill(link)
        link.collection.delete(ids=["a"])
        note_of(kv).write_bytes(content)
        for use in (
            lambda: link.sync(grace_s=0),
            lambda: link_of(tmp_path / "one", kv),
            lambda: link_of(tmp_path / "two", kv),
            lambda: ChromaLink(in_memory("damaged"), engine_of(kv)),
        ):
            with pytest.raises(StoreError, match=r"chroma-owner-\w+.json.*delete the file, and"):
                use()
        assert set(link.engine.store.keys()) == held
        note_of(kv).unlink()
        assert link.sync(grace_s=0).n_pruned == 1

    def test_is_its_owners_alone_and_names_no_namespace(self, tmp_path: Path, kv: Path) -> None:
        link_of(tmp_path / "one", kv, namespace="tenant-7")
        assert stat.S_IMODE(note_of(kv).stat().st_mode) == 0o600
        assert "tenant-7" not in note_of(kv).name + note_of(kv).read_text()

    def test_a_store_that_can_only_be_read_is_used_all_the_same(
        self, tmp_path: Path, kv: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuses(*arguments: object, **options: object) -> bool:
            raise StoreError("read-only")

        monkeypatch.setattr(ChunkStore, "put_note", refuses)
        link = link_of(tmp_path / "one", kv)
        with pytest.raises(StoreError, match="read-only"):
            link.sync(grace_s=0)
        assert link.sync(prune=False).n_records == 0

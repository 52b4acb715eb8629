"""The index of a store's folder: accounting, texts, and what becomes of a damaged one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sqlite3
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest

from samkv_integrations.errors import CacheMiss, StoreError
from samkv_integrations.prompt.layout import find_runs
from samkv_integrations.store.index import Entry, Index, IndexedChunks
from tests.support.chunks import TINY
from tests.support.stores import Files

DIGEST, SECRET = TINY.digest, b"s" * 32
LONG = "The quick brown fox jumps over"


def entry(number: int, text: str = "", **changes: object) -> Entry:
    made = Entry(
        fingerprint=TINY,
        key=f"{number:032x}",
        namespace="",
        text=text or f"{LONG} {number} dogs.",
        token_ids=range(number, number + 40),
        n_bytes=100,
        used_at=float(number),
    )
    return replace(made, **changes)


FILES: WeakKeyDictionary[Index, Files] = WeakKeyDictionary()


def made(folder: Path, *entries: Entry) -> Index:
    files = Files(*entries)
    index = Index(folder, files, SECRET)
    FILES[index] = files
    return index


def put(index: Index, new: Entry) -> None:
    with index.keep(new):
        files_of(index).there.add(new.key)


def files_of(index: Index) -> Files:
    return FILES[index]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return made(tmp_path)


def used(index: Index) -> int:
    return int(index.rows("SELECT coalesce(sum(bytes), 0) FROM chunks")[0][0])


def keys_of(*entries: Entry) -> list[str]:
    return [one.key for one in entries]


def text_of(index: Index, key: str, namespace: str = "") -> str:
    return next((text for *_, text in index.texts(namespace, key)), "")


def found(index: Index, of: Entry, namespace: str = "") -> list[str]:
    """Keys of the chunks that are found by the token ids of one."""
    runs = find_runs(list(of.token_ids), [IndexedChunks(index, namespace, DIGEST)])
    return [each.key for each in runs]


class TestBudget:
    def test_a_file_larger_than_the_budget_evicts_nothing(self, index: Index) -> None:
        index.set_budget(200, {})
        put(index, entry(1))
        with pytest.raises(StoreError, match="250 bytes is larger than the store's max_bytes, 200"):
            put(index, entry(2, n_bytes=250))
        assert files_of(index).removed == [] and used(index) == 100

    def test_many_processes_share_one_budget(self, tmp_path: Path) -> None:
        made(tmp_path).set_budget(500, {})
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=_put_many, args=(tmp_path, n)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        index = made(tmp_path)
        assert used(index) == 500 and len(index.keys("", None, are_present=True)) == 5


def _put_many(folder: Path, worker: int) -> None:
    index = made(folder)
    for number in range(30):
        put(index, entry(100 * worker + number))
        assert used(index) <= 500


class TestDeletion:
    def test_nothing_of_a_text_is_left_in_the_files(self, index: Index, tmp_path: Path) -> None:
        marker = "Confidential matter of Mrs Ottoline Fairweather"
        for number in range(40):
            put(index, entry(number, f"{marker} {number} " + "x" * 3000))
        kept = entry(99)
        put(index, kept)
        keys = [key for key in index.keys("", None) if key != kept.key]
        assert index.delete("", keys) == set(keys)
        assert index.keys("", None) == [kept.key]
        for file in tmp_path.iterdir():
            assert b"Ottoline" not in file.read_bytes(), file

    def test_each_is_seen_by_who_began_before_it_and_so_is_a_rebuild(
        self, index: Index, tmp_path: Path
    ) -> None:
        """A rebuilt index counted from 0 again, so a cache of a deleted chunk could be kept."""
        seen = [index.deletions("")]
        assert index.deletions("") == seen[0]
        index.delete("", [])
        seen.append(index.deletions(""))
        assert index.deletions("other") == seen[0]
        (file,) = tmp_path.glob("index-*.sqlite")
        file.unlink()
        seen.append(index.deletions(""))
        assert len(set(seen)) == 3
        with pytest.raises(CacheMiss, match="something was deleted meanwhile"):
            with index.keep(entry(1), unless_deleted_since=seen[0]):
                pass


class TestDamage:
    @pytest.mark.parametrize("damage", ["flip", "cut", "other", "empty", "gone"])
    def test_it_is_made_anew_from_the_files(self, tmp_path: Path, damage: str) -> None:
        files = [entry(number) for number in range(50)]
        index = made(tmp_path, *files)
        index.keys("", None)
        index.close()
        (file,) = tmp_path.glob("index-*.sqlite")
        data = bytearray(file.read_bytes())
        if damage == "flip":
            for at in range(0, len(data), 512):
                data[at] ^= 0xFF
        file.write_bytes(
            {"cut": data[: len(data) // 2], "other": b"not a database" * 999, "empty": b""}.get(
                damage, data
            )
        )
        if damage == "gone":
            file.unlink()
        with suppress(StoreError):  # a damaged one fails once
            made(tmp_path, *files).keys("", None)
        assert made(tmp_path, *files).keys("", None) == keys_of(*files)
        assert used(made(tmp_path, *files)) == 100 * len(files)

    def test_who_has_it_open_goes_on_with_the_new_one(self, tmp_path: Path) -> None:
        one, other = (made(tmp_path, entry(1)) for _ in range(2))
        assert one.keys("", None) == other.keys("", None) == keys_of(entry(1))
        for file in tmp_path.glob("index-*"):
            file.unlink()
        put(one, entry(2))
        put(other, entry(3))
        assert one.keys("", None) == other.keys("", None) == keys_of(entry(1), entry(2), entry(3))
        assert len(list(tmp_path.glob("index-*.sqlite"))) == 1

    def test_many_that_find_it_missing_make_one(self, tmp_path: Path) -> None:
        indices = [made(tmp_path, entry(1)) for _ in range(6)]
        found: list[list[str]] = []
        threads = [
            threading.Thread(target=lambda index=index: found.append(index.keys("", None)))
            for index in indices
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [keys_of(entry(1))] * 6
        assert len(list(tmp_path.glob("index-*.sqlite"))) == 1

    def test_what_is_left_of_others_is_cleared_up(self, index: Index, tmp_path: Path) -> None:
        put(index, entry(1))
        for name in ("index-00.sqlite.tmp", "index-00.sqlite-journal", "index-00.tmp"):
            (tmp_path / name).write_bytes(b"text")
        index.clear_up()
        assert not list(tmp_path.glob("index-00*")) and index.keys("", None) == keys_of(entry(1))

    def test_a_folder_that_can_only_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(StoreError, match="read-only and has no index; next step: open"):
            made(tmp_path, entry(1)).keys("", None)
        assert not list(tmp_path.iterdir())

    def test_a_full_disk_is_a_store_error(self, index: Index) -> None:
        put(index, entry(1))
        index.rows("PRAGMA max_page_count=1")
        with pytest.raises(StoreError, match="full"):
            for number in itertools.count(2):
                put(index, entry(number, f"{LONG} {number} " + "x" * 5000))
        assert entry(1).key in index.keys("", None)


@pytest.mark.parametrize(
    "change",
    ["texts SET ids = x'ad00ff'", "texts SET body = x'ff'",
     "chunks SET key = CAST(x'ff' AS TEXT)", "fingerprints SET fields = '{'",
     "fingerprints SET fields = '5'"],
)  # fmt: skip
def test_rows_that_sqlite_takes_for_sound_are_damage_too(tmp_path: Path, change: str) -> None:
    """It has no checksums: what was overwritten within a row is handed out."""
    index = made(tmp_path, entry(1))
    with index.transaction(writes=True) as connection:
        connection.execute(f"UPDATE {change}")
    n_failed = 0
    for _ in range(2):
        try:
            assert found(index, entry(1)) == keys_of(entry(1))
            assert index.texts("") == [(DIGEST, entry(1).key, entry(1).text)]
            assert [each.model for each in index.fingerprints()] == ["tiny"]
            assert text_of(index, entry(1).key) == entry(1).text
        except StoreError as error:
            assert "made anew" in str(error) and "try again" in str(error)
            n_failed += 1
    assert n_failed == 1


def test_a_key_that_is_no_text_does_no_harm(index: Index, tmp_path: Path) -> None:
    put(index, entry(1))
    (file,) = tmp_path.glob("index-*.sqlite")
    with pytest.raises(UnicodeEncodeError):
        index.texts("", "\ud800")
    assert file.exists() and index.keys("", None) == keys_of(entry(1))


def test_a_foreign_file_of_that_name_does_no_harm(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "index-00000000.sqlite") as foreign:
        foreign.execute("CREATE TABLE mine(x)")
    foreign.close()
    assert made(tmp_path, entry(1)).keys("", None) == keys_of(entry(1))


def test_an_emptied_file_is_replaced_at_once_though_others_have_it_open(tmp_path: Path) -> None:
    """SQLite takes an empty file for an empty database, and waited for the other process."""
    index = made(tmp_path, entry(1))
    index.keys("", None)
    (file,) = tmp_path.glob("index-*.sqlite")
    file.write_bytes(b"")
    other = made(tmp_path, entry(1))
    with pytest.raises(StoreError, match="try again"):
        other.keys("", None)
    assert other.keys("", None) == keys_of(entry(1))


def test_tables_that_are_not_ours_are_replaced(tmp_path: Path) -> None:
    """A header that was overwritten may be that of a database with another schema, or encoding."""
    index = made(tmp_path, entry(1))
    index.keys("", None)
    with index.transaction(writes=True) as connection:
        connection.execute("DROP TABLE counts")
    put(index, entry(2))
    with pytest.raises(StoreError, match="made anew"):
        index.totals("")
    assert index.totals("")[0][2] == 1 and index.keys("", None) == keys_of(entry(1))


def test_an_error_whose_message_is_no_text_is_damage(tmp_path: Path) -> None:
    """SQLite's messages quote the schema, and sqlite3 raises UnicodeDecodeError for such bytes."""
    index = made(tmp_path, entry(1))
    index.keys("", None)
    index.close()
    (file,) = tmp_path.glob("index-*.sqlite")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"tablechunkschunks", b"tablec\xa2unkschunks"))
    with pytest.raises(StoreError, match="try again"):
        made(tmp_path, entry(1)).keys("", None)
    assert made(tmp_path, entry(1)).keys("", None) == keys_of(entry(1))


def test_who_needs_no_note_does_not_wait_long_for_who_is_stopped(
    tmp_path: Path, index: Index
) -> None:
    """A process that is stopped (SIGSTOP) keeps its locks, for as long as it likes."""
    put(index, entry(1))
    (file,) = tmp_path.glob("index-*.sqlite")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            index.record("", DIGEST, keys_of(entry(1)))
        assert index.keys("", None) == keys_of(entry(1))
    index.record("", DIGEST, keys_of(entry(1)))
    assert index.totals("")[0][4] == 1


def test_a_file_that_was_deleted_before_it_was_kept_leaves_no_text(index: Index) -> None:
    with pytest.raises(CacheMiss, match="absent"):
        index.adopt(entry(1))
    assert index.keys("", None) == [] and index.texts("") == []


def test_a_folder_with_an_index_that_can_only_be_read(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(index, entry(1))
    index.close()
    (file,) = tmp_path.glob("index-*.sqlite")
    file.chmod(0o400)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert made(tmp_path).keys("", None) == keys_of(entry(1))

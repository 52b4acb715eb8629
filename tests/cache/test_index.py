"""The index of a store's folder: accounting, texts, and what becomes of a damaged one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations.cache.index import Index, IndexedChunks
from samkv_integrations.cache.tables import EVICTED, LOST, PRESENT, Entry
from samkv_integrations.errors import StoreError
from samkv_integrations.prompt.layout import find_runs

DIGEST, SECRET = "d" * 32, b"s" * 32
LONG = "The quick brown fox jumps over"


def entry(number: int, text: str = "", **changes: object) -> Entry:
    made = Entry(
        digest=DIGEST,
        key=f"{number:032x}",
        namespace="",
        text=text or f"{LONG} {number} dogs.",
        token_ids=range(number, number + 40),
        n_bytes=100,
        fields={"model": "tiny"},
        used_at=float(number),
    )
    return replace(made, **changes)


class Files:
    """Stands for the files of a store: `evict` deletes those that nobody reads."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.evicted: list[str] = []
        self.dropped: list[str] = []

    def evict(self, digest: str, key: str) -> bool:
        if key in self.read:
            return False
        self.evicted.append(key)
        return True

    def put(self, index: Index, new: Entry) -> None:
        index.budget.reserve(new, f"{new.key}.tmp", self.evict, self.dropped.append)
        index.keep(new, f"{new.key}.tmp")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path, lambda: [], SECRET)


def used(index: Index) -> int:
    (total,) = index.database.read(
        lambda c: c.execute("SELECT coalesce(sum(bytes), 0) FROM spaces").fetchone()
    )
    return total


def keys_of(*entries: Entry) -> list[str]:
    return [one.key for one in entries]


def found(index: Index, of: Entry, namespace: str = "") -> list[str]:
    """Keys of the chunks that are found by the token ids of one."""
    runs = find_runs(list(of.token_ids), [IndexedChunks(index, namespace, DIGEST)])
    return [each.key for each in runs]


class TestBudget:
    def test_the_least_recently_used_go_first(self, index: Index) -> None:
        files = Files()
        index.budget.write(300, {})
        old = [entry(number) for number in range(3)]
        for one in old:
            files.put(index, one)
        index.record("", DIGEST, [old[0].key], [])
        files.put(index, entry(9))
        assert files.evicted == [old[1].key]
        assert index.keys("", None) == sorted(keys_of(old[0], old[2], entry(9)))
        assert index.state(DIGEST, old[1].key) == EVICTED
        assert used(index) == 300
        assert index.counts("")["", DIGEST] == (1, 0, 1, 0)

    def test_what_is_read_stays(self, index: Index) -> None:
        files = Files()
        index.budget.write(200, {})
        for number in range(2):
            files.put(index, entry(number))
        files.read = {entry(0).key}
        files.put(index, entry(2))
        assert files.evicted == [entry(1).key]

    def test_no_room_is_an_error_and_counts_nothing(self, index: Index) -> None:
        files = Files()
        index.budget.write(200, {})
        for number in range(2):
            files.put(index, entry(number))
        files.read = set(keys_of(entry(0), entry(1)))
        with pytest.raises(StoreError, match="200 bytes, and 300 are being read.*next step"):
            files.put(index, entry(2))
        assert used(index) == 200 and index.budget.pending() == []

    def test_a_file_larger_than_the_budget_evicts_nothing(self, index: Index) -> None:
        files = Files()
        index.budget.write(200, {})
        files.put(index, entry(1))
        with pytest.raises(StoreError, match="250 bytes is larger than the store's max_bytes, 200"):
            files.put(index, entry(2, n_bytes=250))
        assert files.evicted == []

    def test_a_quota_is_of_one_namespace(self, index: Index) -> None:
        files = Files()
        index.budget.write(None, {"a": 200})
        for number in range(4):
            files.put(index, entry(number, namespace="a"))
            files.put(index, entry(10 + number, namespace="b"))
        assert index.keys("a", None) == keys_of(entry(2), entry(3))
        assert len(index.keys("b", None)) == 4
        assert index.budget.read() == (None, {"a": 200})

    def test_bytes_count_before_a_file_is_begun(self, index: Index) -> None:
        index.budget.reserve(entry(1), "one.tmp", Files().evict, lambda name: None)
        assert used(index) == 100 and index.keys("", None) == []
        assert index.budget.pending() == [("one.tmp", DIGEST, entry(1).key)]
        index.budget.release("one.tmp")
        assert used(index) == 0

    def test_the_quarantine_counts_and_goes_first(self, index: Index) -> None:
        files = Files()
        index.budget.write(300, {})
        for number in range(3):
            files.put(index, entry(number))
        index.quarantined("", DIGEST, entry(2).key, "damaged", 100)
        assert used(index) == 300 and index.state(DIGEST, entry(2).key) == LOST
        files.put(index, entry(5))
        assert (files.dropped, files.evicted, used(index)) == (["damaged"], [], 300)

    def test_replaced_files_count_once(self, index: Index) -> None:
        files = Files()
        for n_bytes in (100, 70, 120):
            files.put(index, entry(1, n_bytes=n_bytes))
        assert used(index) == 120

    def test_many_processes_share_one_budget(self, tmp_path: Path) -> None:
        Index(tmp_path, lambda: [], SECRET).budget.write(500, {})
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=_put_many, args=(tmp_path, n)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        index = Index(tmp_path, lambda: [], SECRET)
        assert used(index) == 500 and len(index.keys("", None)) == 5


def _put_many(folder: Path, worker: int) -> None:
    index, files = Index(folder, lambda: [], SECRET), Files()
    for number in range(30):
        files.put(index, entry(100 * worker + number))
        assert used(index) <= 500


class TestTexts:
    def test_the_text_put_last(self, index: Index) -> None:
        """Some tokenizers make the same tokens, and so the same chunk, of several texts."""
        index.keep(entry(1, f"{LONG} caf\u00e9"))
        index.keep(entry(1, f"{LONG} cafe\u0301 \ud800"))
        assert index.text("", entry(1).key) == f"{LONG} cafe\u0301 \ud800"
        assert len(list(index.texts(""))) == 1

    def test_what_was_evicted_or_lost_is_known(self, index: Index) -> None:
        index.keep(entry(1))
        index.lose([(DIGEST, entry(1).key)], lambda digest, key: True)
        assert found(index, entry(1)) == keys_of(entry(1)) and index.keys("", None) == []
        index.keep(entry(1))
        assert index.state(DIGEST, entry(1).key) == PRESENT


class TestDeletion:
    def test_nothing_of_a_text_is_left_in_the_files(self, index: Index, tmp_path: Path) -> None:
        marker = "Confidential matter of Mrs Ottoline Fairweather"
        for number in range(40):
            index.keep(entry(number, f"{marker} {number} " + "x" * 3000))
        kept = entry(99)
        index.keep(kept)
        keys = [key for key in index.keys("", None) if key != kept.key]
        index.end_deleting(index.begin_to_delete("", keys))
        assert index.keys("", None) == [kept.key]
        for file in tmp_path.iterdir():
            assert b"Ottoline" not in file.read_bytes(), file

    def test_is_of_one_namespace(self, index: Index) -> None:
        index.keep(entry(1, namespace="a"))
        assert index.begin_to_delete("b", [entry(1).key]) == []
        assert index.text("a", entry(1).key) and index.keys("a", None)

    def test_a_chunk_that_is_put_meanwhile_stays(self, index: Index) -> None:
        index.keep(entry(1))
        going = index.begin_to_delete("", [entry(1).key])
        index.keep(entry(1))
        index.end_deleting(going)
        assert index.keys("", None) == [entry(1).key]


class TestDamage:
    @pytest.mark.parametrize("damage", ["flip", "cut", "other", "empty", "gone"])
    def test_it_is_made_anew_from_the_files(self, tmp_path: Path, damage: str) -> None:
        files = [entry(number) for number in range(50)]
        index = Index(tmp_path, lambda: files, SECRET)
        index.keys("", None)
        index.database.close()
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
        assert Index(tmp_path, lambda: files, SECRET).keys("", None) == keys_of(*files)
        assert used(Index(tmp_path, lambda: files, SECRET)) == 100 * len(files)

    def test_who_has_it_open_goes_on_with_the_new_one(self, tmp_path: Path) -> None:
        one, other = (Index(tmp_path, lambda: [entry(1)], SECRET) for _ in range(2))
        assert one.keys("", None) == other.keys("", None) == keys_of(entry(1))
        for file in tmp_path.glob("index-*"):
            file.unlink()
        one.keep(entry(2))
        other.keep(entry(3))
        assert one.keys("", None) == other.keys("", None) == keys_of(entry(1), entry(2), entry(3))
        assert len(list(tmp_path.glob("index-*.sqlite"))) == 1

    def test_many_that_find_it_missing_make_one(self, tmp_path: Path) -> None:
        indices = [Index(tmp_path, lambda: [entry(1)], SECRET) for _ in range(6)]
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
        index.keep(entry(1))
        for name in ("index-00.sqlite.tmp", "index-00.sqlite-wal", "index-00.sqlite.tmp-journal"):
            (tmp_path / name).write_bytes(b"text")
        index.database.clear_up()
        assert not list(tmp_path.glob("index-00*")) and index.keys("", None) == keys_of(entry(1))

    def test_a_folder_that_has_gone_is_not_made_again(self, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        folder.mkdir()
        index = Index(folder, lambda: [], SECRET)
        index.keep(entry(1))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        with pytest.raises(StoreError, match="next step"):
            index.keys("", None)
        assert not folder.exists()

    def test_a_folder_that_can_only_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        index = Index(tmp_path, lambda: [entry(1)], SECRET)
        assert index.keys("", None) == keys_of(entry(1)) and not list(tmp_path.iterdir())

    def test_a_full_disk_is_a_store_error(self, index: Index) -> None:
        index.keep(entry(1))
        index.database.read(lambda c: c.execute("PRAGMA max_page_count=1").fetchall())
        with pytest.raises(StoreError, match="full"):
            for number in itertools.count(2):
                index.keep(entry(number, f"{LONG} {number} " + "x" * 5000))
        assert entry(1).key in index.keys("", None)


@pytest.mark.parametrize(
    "change",
    ["texts SET ids = x'ad00ff'", "texts SET ids = 5", "texts SET body = x'ff'",
     "texts SET key = CAST(x'ff' AS TEXT)", "fingerprints SET fields = '{'",
     "fingerprints SET fields = '5'"],
)  # fmt: skip
def test_rows_that_sqlite_takes_for_sound_are_damage_too(tmp_path: Path, change: str) -> None:
    """It has no checksums: what was overwritten within a row is handed out."""
    index = Index(tmp_path, lambda: [entry(1)], SECRET)
    index.database.write(lambda c: c.execute(f"UPDATE {change}"))
    assert found(index, entry(1)) == keys_of(entry(1))
    assert list(index.texts("")) == [(DIGEST, entry(1).key, entry(1).text)]
    assert index.fingerprints() == {DIGEST: {"model": "tiny"}}
    assert index.text("", entry(1).key) == entry(1).text


def test_is_of_use_after_a_fork(index: Index) -> None:
    index.keep(entry(1))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: index.keep(entry(2)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert index.keys("", None) == keys_of(entry(1), entry(2))


def test_a_foreign_file_of_that_name_does_no_harm(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "index-00000000.sqlite") as foreign:
        foreign.execute("CREATE TABLE mine(x)")
    foreign.close()
    assert Index(tmp_path, lambda: [entry(1)], SECRET).keys("", None) == keys_of(entry(1))


def test_one_that_another_release_made_is_made_anew(tmp_path: Path) -> None:
    index = Index(tmp_path, lambda: [], SECRET)
    index.database.write(lambda c: c.execute("PRAGMA user_version=7"))
    index.database.close()
    assert Index(tmp_path, lambda: [entry(1)], SECRET).keys("", None) == keys_of(entry(1))


def test_who_does_not_need_to_write_does_not_wait_long(index: Index, tmp_path: Path) -> None:
    index.keep(entry(1))
    (file,) = tmp_path.glob("index-*.sqlite")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        index.record("", DIGEST, [entry(1).key], [])
    other.execute("ROLLBACK")
    other.close()
    index.record("", DIGEST, [entry(1).key], [])


def test_what_is_asked_by_key_looks_at_no_other_chunk(index: Index) -> None:
    """SQLite went through all texts of a namespace for each: 5 ms at 50,000 chunks."""
    entries = [entry(number) for number in range(3)]
    for one in entries:
        Files().put(index, one)
    statements: list[str] = []
    index.database.read(lambda c: c.set_trace_callback(statements.append))
    (key,) = keys_of(entries[0])
    assert index.text("", key) and index.same_texts("", [key]) == {key}
    assert index.begin_to_delete("", [key]) == [(DIGEST, key)]
    index.database.read(lambda c: c.set_trace_callback(None))
    by_key = [one for one in statements if "key = '" in one or "same = " in one]
    steps = [
        step
        for one in by_key
        for *_, step in index.database.read(
            lambda c, one=one: c.execute(f"EXPLAIN QUERY PLAN {one}").fetchall()
        )
        if " chunks " in step or " texts " in step
    ]
    assert len(steps) >= 6
    assert all("key=?" in step or "same=?" in step for step in steps), steps


def test_an_emptied_file_is_replaced_at_once_though_others_have_it_open(tmp_path: Path) -> None:
    """SQLite takes an empty file for an empty database, and waited for the other process."""
    index = Index(tmp_path, lambda: [entry(1)], SECRET)
    index.keys("", None)
    (file,) = tmp_path.glob("index-*.sqlite")
    file.write_bytes(b"")
    other = Index(tmp_path, lambda: [entry(1)], SECRET)
    assert other.keys("", None) == keys_of(entry(1))


def test_tables_that_are_not_ours_are_replaced(tmp_path: Path) -> None:
    """A header that was overwritten may be that of a database with another schema, or encoding."""
    index = Index(tmp_path, lambda: [entry(1)], SECRET)
    index.keys("", None)
    index.database.write(lambda c: c.execute("DROP TABLE pending"))
    index.keep(entry(2))
    assert index.keys("", None) == keys_of(entry(1), entry(2))

"""The index of a store while other processes are forked, stopped, or in its way."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NoReturn

import pytest

from samkv_integrations.cache.files import Writer, dead_writers, locked
from samkv_integrations.cache.index import Index
from samkv_integrations.cache.tables import Entry
from samkv_integrations.errors import StoreError

DIGEST, SECRET = "d" * 32, b"s" * 32
FORKS = multiprocessing.get_context("fork")
PATIENCE_S = 60


def entry(number: int) -> Entry:
    return Entry(
        digest=DIGEST,
        key=f"{number:032x}",
        namespace="",
        text=f"The quick brown fox jumps over {number} dogs.",
        token_ids=range(number, number + 40),
        n_bytes=100,
        fields={"model": "tiny"},
        used_at=float(number),
    )


def keys(*numbers: int) -> list[str]:
    return [entry(number).key for number in numbers]


def no_one_reads(digest: str, key: str) -> bool:
    return True


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path, lambda: [], SECRET)


@contextmanager
def connected(folder: Path) -> Iterator[sqlite3.Connection]:
    """What another process may do to the database."""
    (file,) = folder.glob("index-*.sqlite")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        yield connection


class TestForks:
    def test_a_child_writes_where_others_read(self, tmp_path: Path, index: Index) -> None:
        """Who leaves last clears SQLite's log away, and must know that the child is there."""
        index.keep(entry(1))
        is_open, goes_on = FORKS.Event(), FORKS.Event()
        child = FORKS.Process(target=_keep_two, args=(index, is_open, goes_on))
        child.start()
        assert is_open.wait(PATIENCE_S)
        index.database.close()
        with connected(tmp_path) as last:
            assert last.execute("SELECT count(*) FROM chunks").fetchone() == (2,)
        goes_on.set()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert Index(tmp_path, lambda: [], SECRET).keys("", None) == keys(1, 2, 3)

    def test_a_thread_that_is_not_in_the_child_holds_nothing_there(self, index: Index) -> None:
        index.keep(entry(1))
        is_in, may_leave = threading.Event(), threading.Event()

        def stay(connection: sqlite3.Connection) -> None:
            is_in.set()
            may_leave.wait(PATIENCE_S)

        work = threading.Thread(target=lambda: index.database.read(stay))
        work.start()
        assert is_in.wait(PATIENCE_S)
        child = FORKS.Process(target=lambda: index.keep(entry(2)))
        child.start()
        may_leave.set()
        work.join(PATIENCE_S)
        child.join(PATIENCE_S)
        child.kill()  # if it hangs
        child.join()
        assert child.exitcode == 0
        assert index.keys("", None) == keys(1, 2)

    def test_a_child_does_not_make_a_dead_parent_look_alive(self, tmp_path: Path) -> None:
        (is_forked, tell_forked), (may_end, tell_end) = os.pipe(), os.pipe()
        if not (parent := os.fork()):
            os.close(tell_end)
            _write_and_fork(tmp_path, tell_forked, may_end)
        assert os.read(is_forked, 1)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        dead = dead_writers(tmp_path)
        os.close(tell_end)
        assert dead == os.listdir(tmp_path / "writers") and len(dead) == 1


def _keep_two(index: Index, is_open: Event, goes_on: Event) -> None:
    index.keep(entry(2))
    is_open.set()
    assert goes_on.wait(PATIENCE_S)
    index.keep(entry(3))


def _write_and_fork(folder: Path, tell_forked: int, may_end: int) -> NoReturn:
    writer = Writer(folder)
    if writer.name and not os.fork():
        os.write(tell_forked, b"x")
    os.read(may_end, 1)  # until the test ends, however it does
    os._exit(0)


class TestStopped:
    """A process that is stopped (SIGSTOP) keeps its locks, for as long as it likes."""

    def test_a_lock_is_waited_for_and_not_for_ever(self, tmp_path: Path) -> None:
        file = tmp_path / "lock"
        with locked(file, 0.05):
            with pytest.raises(TimeoutError, match="another process has held lock"):
                with locked(file, 0.05):
                    pass
        with locked(file, 0.05):
            pass

    @pytest.mark.slow
    def test_who_makes_the_index_may_be_stopped(self, tmp_path: Path, index: Index) -> None:
        with open(tmp_path / "index.lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for most_s in (PATIENCE_S + 30, 10):  # nobody waits for the same twice
                started = time.monotonic()
                with pytest.raises(StoreError, match="another process has held index.lock"):
                    index.keys("", None)
                assert time.monotonic() - started < most_s
        assert index.keys("", None) == []

    @pytest.mark.slow
    def test_who_writes_may_be_stopped(self, tmp_path: Path, index: Index) -> None:
        index.keep(entry(1))
        with connected(tmp_path) as other:
            other.execute("BEGIN IMMEDIATE")
            for most_s in (PATIENCE_S + 30, 10):
                started = time.monotonic()
                with pytest.raises(StoreError, match="locked"):
                    index.keep(entry(2))
                assert time.monotonic() - started < most_s
            assert index.keys("", None) == keys(1)
        index.keep(entry(2))
        assert index.keys("", None) == keys(1, 2)

    def test_who_reads_may_be_stopped(self, tmp_path: Path, index: Index) -> None:
        index.keep(entry(1))
        with connected(tmp_path) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM chunks").fetchone()
            started = time.monotonic()
            index.end_deleting(index.begin_to_delete("", keys(1)))
            assert time.monotonic() - started < PATIENCE_S / 2


class TestRaces:
    def test_a_file_that_was_deleted_before_it_was_kept_leaves_no_text(self, index: Index) -> None:
        index.keep(entry(1), is_gone=lambda digest, key: True)
        assert index.keys("", None) == [] and list(index.texts("")) == []

    def test_a_file_that_is_kept_while_it_is_deleted_leaves_no_text(self, index: Index) -> None:
        index.keep(entry(1))
        places = index.begin_to_delete("", keys(1))
        index.keep(entry(1))
        index.end_deleting(places, lambda digest, key: False)
        assert index.keys("", None) == keys(1), "the file is a new one"
        index.end_deleting(places, lambda digest, key: True)
        assert index.keys("", None) == [] and list(index.texts("")) == []

    def test_what_could_not_be_released_is_later(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.budget.write(150, {})
        index.budget.reserve(entry(1), "one.tmp", no_one_reads, lambda name: None)
        with monkeypatch.context() as patch:
            patch.setattr(index.database, "write", _locked)
            with pytest.raises(StoreError, match="locked"):
                index.budget.release("one.tmp")
        index.budget.reserve(entry(2), "two.tmp", no_one_reads, lambda name: None)
        assert [name for name, *_ in index.budget.pending()] == ["two.tmp"]


def _locked(work: object) -> None:
    raise StoreError("locked; next step: wait")


@pytest.mark.parametrize("name", ["wal", "shm"])
def test_what_cannot_be_written_for_a_moment_can_be_later(
    tmp_path: Path, index: Index, name: str
) -> None:
    index.keep(entry(1))
    index.database.close()
    (file,) = tmp_path.glob("index-*.sqlite")
    obstacle = Path(f"{file}-{name}")
    obstacle.mkdir()
    assert index.keys("", None) == keys(1)
    with pytest.raises(StoreError):
        index.keep(entry(2))
    obstacle.rmdir()
    index.keep(entry(2))
    assert index.keys("", None) == keys(1, 2)

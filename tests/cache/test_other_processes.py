"""The index of a store while other processes are in its way."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from samkv_integrations.cache.index.index import Entry, Index
from samkv_integrations.errors import CacheMiss, StoreError
from tests.support.chunks import tiny_fingerprint
from tests.support.stores import Files

TINY = tiny_fingerprint()
DIGEST, SECRET = TINY.digest, b"s" * 32


def entry(number: int) -> Entry:
    return Entry(
        fingerprint=TINY,
        key=f"{number:032x}",
        namespace="",
        text=f"The quick brown fox jumps over {number} dogs.",
        token_ids=range(number, number + 40),
        n_bytes=100,
        used_at=float(number),
    )


def keys(*numbers: int) -> list[str]:
    return [entry(number).key for number in numbers]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path, Files(), SECRET)


@contextmanager
def connected(folder: Path) -> Iterator[sqlite3.Connection]:
    """What another process may do to the database."""
    (file,) = folder.glob("index-*.sqlite")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        yield connection


class TestStopped:
    """A process that is stopped (SIGSTOP) keeps its locks, for as long as it likes."""

    def test_who_needs_no_note_does_not_wait_long(self, tmp_path: Path, index: Index) -> None:
        index.keep(entry(1), lambda: None)
        with connected(tmp_path) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked"):
                index.record("", DIGEST, keys(1))
            assert index.keys("", None) == keys(1)
        index.record("", DIGEST, keys(1))
        assert index.totals("")[0][4] == 1


def test_a_file_that_was_deleted_before_it_was_kept_leaves_no_text(index: Index) -> None:
    with pytest.raises(CacheMiss, match="absent"):
        index.keep(entry(1))
    assert index.keys("", None) == [] and index.texts("") == []


def test_a_folder_with_an_index_that_can_only_be_read(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.keep(entry(1), lambda: None)
    index.close()
    (file,) = tmp_path.glob("index-*.sqlite")
    file.chmod(0o400)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert Index(tmp_path, Files(), SECRET).keys("", None) == keys(1)

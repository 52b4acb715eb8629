"""An index of the words of a collection's records, ranked by BM25 in SQLite's FTS5."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category

from samkv_integrations.chroma.records import Records
from samkv_integrations.errors import StoreError
from samkv_integrations.store.database import Database

FOLDER = "words"
"""The folder of these indexes, in the folder of the chunk caches: one each, named by the id."""

MOST_WORDS = 64
"""Most words of a question that are looked up, the first ones: each takes time."""

_SCHEMA = """
CREATE TABLE records(
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, text TEXT NOT NULL, spaced TEXT
);
CREATE VIEW indexed AS SELECT number, coalesce(spaced, text) AS text FROM records;
CREATE VIRTUAL TABLE words USING fts5(
  text, content=indexed, content_rowid=number,
  tokenize="porter unicode61 categories 'L* M* N* Co'"
);
CREATE TRIGGER put AFTER INSERT ON records BEGIN
  INSERT INTO words(rowid, text) VALUES (new.number, coalesce(new.spaced, new.text));
END;
CREATE TRIGGER gone AFTER DELETE ON records BEGIN
  INSERT INTO words(words, rowid, text)
  VALUES ('delete', old.number, coalesce(old.spaced, old.text));
END;
"""

_UNSPACED = re.compile(
    "["
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Myanmar, Khmer
    "\u1100-\u11ff\uac00-\ud7ff"  # Hangul, whose words take endings
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "]+"
)
"""Runs in scripts that are written without spaces between words."""

_STOP_WORDS = frozenset(
    "a about after all also an and any are as at be because been before being between both but by "
    "can could did do does doing done during each for from had has have having he her hers him his "
    "how i if in into is it its itself just me more most my no nor not of off on once only or "
    "other our ours out over own please same she should so some such than that the their theirs "
    "them then there these they this those through to too under until up very was we were what "
    "when where which while who whom whose why will with would you your yours".split()
)
"""English words that nearly all texts contain. A question of such words alone keeps them."""


class WordIndex(Database):
    """Finds the records that share words with a question.

    It is made of the records at the first question, then `put` and `delete` follow them. Changes by
    another client of the database are noticed at a question if the number of records, or a text
    that it finds, differs; `ChromaLink.sync` makes the index anew in any case.

    Raises StoreError as `Database` does.

    folder: of the index of this collection; None to keep it in memory.
    """

    def __init__(self, records: Records, folder: Path | None) -> None:
        super().__init__(folder, _SCHEMA)
        self._records = records

    @classmethod
    def of(cls, records: Records, caches: Path | None, namespace: str) -> WordIndex:
        """The index of a collection.

        caches: the folder of its chunk caches, if there is one. namespace: of the caches; each
        belongs to one database.
        """
        if caches is None or not os.access(caches, os.W_OK):
            return cls(records, None)
        return cls(records, _folder_of(caches, namespace) / str(records.collection.id))

    def fill(self, connection: sqlite3.Connection) -> None:
        for page in self._records.pages(self._records.ids(None), ["documents"]):
            _insert(connection, zip(page["ids"], page["documents"] or (), strict=True))

    def rows(self, sql: str, *values: object) -> list[Any]:
        """The rows of one statement; a damaged index is made anew for it."""
        try:
            return super().rows(sql, *values)
        except StoreError:
            if self._path is None or self._path.exists():  # it is not damaged, else it is deleted
                raise
            return super().rows(sql, *values)

    @property
    def exists(self) -> bool:
        """Whether it was made, so that changes of records must be followed."""
        return self._connection is not None if self._folder is None else self._folder.is_dir()

    def put(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        """Index records, in place of those with the same ids, which have just been written."""
        if self.exists:
            with self._or_made_anew(), self.transaction(writes=True) as connection:
                _delete(connection, ids)
                _insert(connection, zip(ids, texts, strict=True))

    def delete(self, ids: Collection[str]) -> None:
        """Remove records, and what the file still holds of their words."""
        if self.exists:
            with self._or_made_anew(), self.transaction(writes=True) as connection:
                _delete(connection, ids)
                # FTS5 keeps deleted words until its parts are merged
                connection.execute("INSERT INTO words(words) VALUES ('optimize')")

    def search(self, question: str, k: int) -> dict[str, tuple[str, float]]:
        """The ``k`` records that match best: id -> text and BM25, which is less for better ones.

        If fewer share a word with the question, there are fewer; if none does, the first records.
        """
        if words := _words_of(question):
            matched = self.rows(
                "SELECT id, records.text, bm25(words) FROM words JOIN records ON number = "
                "words.rowid WHERE words MATCH ? ORDER BY bm25(words), number LIMIT ?",
                " OR ".join(f'"{word}"' for word in words), k,
            )  # fmt: skip
            if matched:
                return {id_: (text, score) for id_, text, score in matched}
        first = self.rows(
            "SELECT id, text, 0.0 FROM records WHERE text != '' ORDER BY number LIMIT ?", k
        )
        return {id_: (text, score) for id_, text, score in first}

    def count(self) -> int:
        """The number of records. Makes the index."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        ((n_records,),) = self.rows("SELECT count(*) FROM records")
        return int(n_records)

    @contextmanager
    def _or_made_anew(self) -> Iterator[None]:
        """A block after whose failure the next question makes the index anew."""
        try:
            yield
        except StoreError:
            self.forget()

    def forget(self) -> None:
        """Delete it, so that the next question makes it anew."""
        self.close()
        if self._folder is not None:  # also a file that this process has not opened
            shutil.rmtree(self._folder, ignore_errors=True)

    def rebuild(self, n_records: int | None = None) -> None:
        """Make it anew of the present records, unless it has ``n_records``."""
        with self.transaction(writes=True) as connection:
            if n_records is not None and self.count() == n_records:  # by another thread
                return
            connection.execute("DELETE FROM records")
            self.fill(connection)
            connection.execute("INSERT INTO words(words) VALUES ('optimize')")


def _folder_of(caches: Path, namespace: str) -> Path:
    return caches / FOLDER / hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()


def remove_others(caches: Path, namespace: str, collections: Iterable[str]) -> None:
    """Delete the indexes of a namespace's collections that do not exist any more, by their ids."""
    known = set(collections)
    for folder in _folder_of(caches, namespace).glob("*"):
        if folder.name not in known:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise StoreError(
                    f"{folder} holds texts of a deleted collection, and cannot be deleted: "
                    f"{error.strerror}; delete it"
                ) from error


def _insert(connection: sqlite3.Connection, rows: Iterable[tuple[str, str | None]]) -> None:
    """Add rows of id and text."""
    texts = [(id_, text or "") for id_, text in rows]
    connection.executemany(
        "INSERT INTO records(id, text, spaced) VALUES (?, ?, ?)",
        [(id_, text, spaced if (spaced := _spaced(text)) != text else None) for id_, text in texts],
    )


def _delete(connection: sqlite3.Connection, ids: Iterable[str]) -> None:
    connection.executemany("DELETE FROM records WHERE id = ?", [(id_,) for id_ in ids])


def _spaced(text: str) -> str:
    """The text with each run without spaces as overlapping pairs of letters, its words unknown."""

    def pairs(run: re.Match[str]) -> str:
        letters = run[0]
        return f" {' '.join(map(''.join, pairwise(letters))) or letters} "

    return _UNSPACED.sub(pairs, text)


def _words_of(question: str) -> list[str]:
    """Its distinct words without stop words, in order."""
    letters = (c if c.isalnum() or c == "_" or category(c)[0] == "M" else " " for c in question)
    words = _spaced("".join(letters)).lower().split()
    rare = [word for word in words if word not in _STOP_WORDS]
    return list(dict.fromkeys(rare or words))[:MOST_WORDS]

"""The index of a store: which chunks there are, what they take, their texts and token ids.

Chunk files are the truth, and reading a cache does not ask the index. It is an SQLite database that
is derived from the files, and made anew from them where it is missing or damaged. What the files do
not say is lost then: texts of evicted caches, the budget, the block size, and counts of hits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock

from samkv_integrations.cache.chunk import BEHIND, ChunkCache, Fingerprint, normalise
from samkv_integrations.cache.file_format import ChunkFile, FileLayout, text_bytes
from samkv_integrations.cache.windows import MAX_PLACES, Found, Ids, Windows
from samkv_integrations.cache.windows import Place as Window
from samkv_integrations.errors import CacheMiss, InvalidOption, StoreError

PRESENT, EVICTED, LOST = range(3)
"""States of a chunk: its cache is there; it went for want of room, or is in the remote tier only;
it was not where it should be, or damaged."""

MOST = 2**63 - 1
"""What SQLite can count to."""

Place = tuple[str, str]
"""Digest of the fingerprint, and key, of a chunk."""

_log = logging.getLogger(__name__)
_BUSY_S = 60.0
BRIEF_S = 1.0
"""How long to wait for another process with notes that a question leaves, and does not need."""

# `spaces` has what is true of a namespace, its bytes kept by triggers. `texts` has the text and the
# token ids of each chunk, `same` being a hash of the body. `windows` says where hashes of token ids
# occur first.
_SCHEMA = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value ANY) WITHOUT ROWID, STRICT;
CREATE TABLE fingerprints(
  digest TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE spaces(
  namespace TEXT PRIMARY KEY, bytes INTEGER NOT NULL DEFAULT 0, quota INTEGER
) WITHOUT ROWID, STRICT;
CREATE TABLE chunks(
  id INTEGER PRIMARY KEY, digest TEXT NOT NULL, key TEXT NOT NULL, namespace TEXT NOT NULL,
  bytes INTEGER NOT NULL, state INTEGER NOT NULL, used_at REAL NOT NULL,
  is_shared INTEGER NOT NULL DEFAULT 0, UNIQUE(key, digest)) STRICT;
CREATE INDEX chunks_used ON chunks(state, used_at);
CREATE INDEX chunks_of ON chunks(namespace, state, digest);
CREATE TABLE texts(
  id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, body BLOB NOT NULL, same BLOB NOT NULL,
  ids BLOB NOT NULL) STRICT;
CREATE INDEX texts_same ON texts(same, namespace);
CREATE TABLE windows(
  hash INTEGER, chunk INTEGER, at INTEGER NOT NULL,
  PRIMARY KEY(hash, chunk)) WITHOUT ROWID, STRICT;
CREATE TABLE counts(
  namespace TEXT, digest TEXT, hits INTEGER NOT NULL DEFAULT 0, misses INTEGER NOT NULL DEFAULT 0,
  evictions INTEGER NOT NULL DEFAULT 0, corrupt INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY(namespace, digest)) WITHOUT ROWID, STRICT;
CREATE TRIGGER chunks_in AFTER INSERT ON chunks BEGIN
  INSERT INTO spaces(namespace, bytes) VALUES(NEW.namespace, NEW.bytes)
    ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes; END;
CREATE TRIGGER chunks_out AFTER DELETE ON chunks BEGIN
  UPDATE spaces SET bytes = bytes - OLD.bytes WHERE namespace = OLD.namespace; END;
CREATE TRIGGER chunks_new AFTER UPDATE OF bytes ON chunks BEGIN
  UPDATE spaces SET bytes = bytes + NEW.bytes - OLD.bytes WHERE namespace = NEW.namespace; END;
"""
if sqlite3.sqlite_version_info < (3, 37):  # any type goes into any column
    for _word in (", STRICT", " STRICT", " ANY"):
        _SCHEMA = _SCHEMA.replace(_word, "")
# Part of the name of a database: one of another schema is overlooked, and deleted by `gc`.
_PREFIX = f"index-{zlib.crc32(_SCHEMA.encode()):08x}"
# What sqlite3 raises: the second where an error's message has bytes of the file that are no text.
_FAILS = (sqlite3.Error, UnicodeDecodeError)
# Rows that SQLite takes for sound, and which are none of ours.
_BAD_ROWS = (ValueError, TypeError, AttributeError, RecursionError)
# All SQL here is ours and right, so an error in it is one of the tables that it meets.
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_ERROR,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cache, as the index is told of it. fields: of its fingerprint.

    That of a beginning, see `Fingerprint.behind`, has neither text nor token ids: nobody looks for
    it by either.
    """

    digest: str
    key: str
    namespace: str
    text: str
    token_ids: Sequence[int]
    n_bytes: int
    fields: dict[str, Any]
    used_at: float
    unless_deleted_since: int | None = None

    @classmethod
    def of(
        cls, chunk: ChunkCache, namespace: str, unless_deleted_since: int | None = None
    ) -> Entry:
        """Of a chunk that is about to be put."""
        made_by = chunk.fingerprint
        return cls(
            digest=made_by.digest, key=chunk.key, namespace=namespace, text=chunk.text,
            token_ids=() if made_by.is_of_beginning else chunk.token_ids.tolist(),
            fields=asdict(made_by),
            n_bytes=FileLayout.of(chunk, namespace).file_size(chunk.key), used_at=time.time(),
            unless_deleted_since=unless_deleted_since,
        )  # fmt: skip

    @classmethod
    def of_file(cls, file: ChunkFile) -> Entry:
        """Of an open file. Raises CacheMiss."""
        layout, made_by = file.layout, file.layout.fingerprint
        return cls(
            digest=made_by.digest, key=file.key, namespace=layout.namespace, text=file.text(),
            token_ids=() if made_by.is_of_beginning else file.token_ids.tolist(),
            fields=asdict(made_by),
            n_bytes=layout.file_size(file.key), used_at=file.modified_at,
        )  # fmt: skip


class Caches(Protocol):
    """What an index knows of: the files in a folder, or the caches in memory."""

    def entries(self) -> Iterable[Entry]:
        """All sound caches, read when an index has to be made."""

    def is_gone(self, digest: str, key: str) -> bool:
        """Whether there is no cache of a chunk."""

    def remove(self, digest: str, key: str) -> None:
        """Delete the cache of a chunk, if there is one. Raises StoreError."""

    def remove_all(self, digest: str) -> None:
        """Delete all caches of a fingerprint, known or not. Raises StoreError."""


class Index:
    """What a store holds. Every method raises StoreError if the database cannot be used.

    SQLite's rollback journal is used, and no write-ahead log: a forked process may open the
    database anew, a folder that can only be read is read, and what is deleted is in no log.

    Args:
        folder: of the store; None for an index in memory.
        caches: what the index is of.
        secret: of the store, which hashes of token ids are keyed with.
    """

    def __init__(self, folder: Path | None, caches: Caches, secret: bytes) -> None:
        # a function of its own, as caching a method would keep the index alive
        self.windows_of = lru_cache(64)(lambda space, digest: Windows(secret, space, digest))
        self._folder, self._caches = folder, caches
        self._lock, self._process = threading.RLock(), os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._of_parent: sqlite3.Connection | None = None
        self._path: Path | None = None  # None for one in memory
        self._is_held_up = False

    # -- transactions ---------------------------------------------------------------------------

    @contextmanager
    def transaction(
        self, *, writes: bool = False, patience_s: float = _BUSY_S
    ) -> Iterator[sqlite3.Connection]:
        """A block that sees the database as it is at one moment.

        writes: all of what the block writes is kept or nothing, and no other process writes.
        patience_s: how long to wait for another process. After one long wait in vain, as for a
            process that is stopped in the middle of its commit, waits are brief until one ends.

        A database that turns out to be damaged is deleted: the next transaction makes it anew.
        """
        if self._process != os.getpid():  # a fork: what it inherits is the parent's
            self._lock, self._process = threading.RLock(), os.getpid()
            if self._path is not None:  # kept, as closing it would end locks of this process
                self._of_parent, self._connection = self._connection, None
        with self._lock:
            patience_s = min(patience_s, BRIEF_S) if self._is_held_up else patience_s
            try:
                connection = self._open(patience_s)
                connection.execute(f"PRAGMA busy_timeout={int(1000 * patience_s)}")
                connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                try:
                    yield connection
                    connection.execute("COMMIT")
                    self._is_held_up = False
                except BaseException:
                    with suppress(*_FAILS):  # SQLite itself rolls back after some errors
                        connection.execute("ROLLBACK")
                    raise
            except UnicodeEncodeError:  # what was asked for is no text; no row is damaged
                raise
            except (sqlite3.Error, OSError, *_BAD_ROWS) as error:
                is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                self._is_held_up |= is_busy and patience_s > BRIEF_S
                where = f"the index of {self._folder or 'the store'}"
                if self._path is not None and _is_damage(error):
                    self._discard()
                    raise StoreError(
                        f"{where} was damaged and is made anew ({error}); next step: try again"
                    ) from error
                raise StoreError(
                    f"cannot use {where}: {error}; next step: "
                    "make room or allow access there, or use a store in another folder"
                ) from error

    def _open(self, patience_s: float) -> sqlite3.Connection:
        """The connection to the database, which is made if there is none that can be used."""
        if self._path is not None and not self._path.exists():  # another process has replaced it
            self.close()
        if self._connection is not None:
            return self._connection
        self._path = self._newest()
        if self._path is not None:
            try:
                self._connection = _connect(str(self._path), patience_s)
                self._connection.execute("SELECT * FROM settings").fetchall()
                return self._connection
            except _FAILS as error:
                if not _is_damage(error):
                    raise
                self._discard()
        if self._folder is not None and os.access(self._folder, os.W_OK):
            with FileLock(self._folder / "index.lock", timeout=_BUSY_S, mode=0o600):
                self._path = self._newest() or self._make(self._folder)
            self._connection = _connect(str(self._path))
            return self._connection
        if self._folder is not None:
            _log.warning("%s has no index and takes none; one is kept in memory", self._folder)
        self._connection = _connect(":memory:")
        self._fill(self._connection)
        return self._connection

    def _newest(self) -> Path | None:
        names = os.listdir(self._folder) if self._folder else []
        found = [n for n in names if n.startswith(_PREFIX) and n.endswith(".sqlite")]
        return self._folder / max(found) if self._folder and found else None

    def _make(self, folder: Path) -> Path:
        """A new database, which appears under its name when it is complete.

        The name is a random one, as SQLite's journal must never meet another database.
        """
        path = folder / f"{_PREFIX}-{secrets.token_hex(4)}.sqlite"
        temporary = path.with_suffix(".tmp")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with closing(_connect(str(temporary))) as connection:
                self._fill(connection)
            temporary.rename(path)
        finally:
            for file in folder.glob(f"{temporary.name}*"):
                file.unlink(missing_ok=True)
        return path

    def _fill(self, connection: sqlite3.Connection) -> None:
        connection.executescript(f"BEGIN; {_SCHEMA}")
        for entry in self._caches.entries():
            self._insert(connection, entry)
        connection.execute("COMMIT")

    def _discard(self) -> None:
        self.close()
        if self._path is not None:
            with suppress(OSError):  # a folder that can only be read keeps it
                self._path.unlink()
            self._path = None

    def rows(self, sql: str, *values: object) -> list[Any]:
        """The rows of one SELECT."""
        with self.transaction() as connection:
            return connection.execute(sql, values).fetchall()

    def clear_up(self) -> None:
        """Delete what other releases, and processes that were killed, left of databases."""
        if self._folder is not None:
            with suppress(StoreError):  # it is deleted
                if self.rows("PRAGMA quick_check") != [("ok",)]:
                    self._discard()
            with FileLock(self._folder / "index.lock", timeout=_BUSY_S, mode=0o600):
                newest = self._newest()
                for file in self._folder.glob("index-*"):
                    if newest is None or not file.name.startswith(newest.name):
                        file.unlink(missing_ok=True)

    def vacuum(self) -> None:
        """Rewrite the database: its pages may keep bytes of what was deleted. Best effort."""
        with self._lock, suppress(StoreError, *_FAILS):  # others may be using it
            with self.transaction() as connection:
                pass
            connection.execute("VACUUM")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    # -- caches that come and go ------------------------------------------------------------------

    def keep(self, entry: Entry, place: Callable[[], object] | None = None) -> None:
        """Make room for a cache, by evicting those used least recently, and take note of it.

        place: puts the cache where it belongs, while no other process evicts or deletes; None if
            it is there.

        Raises StoreError if it is larger than a budget, CacheMiss if it has gone, or if something
        was deleted since it was asked for.
        """
        since = entry.unless_deleted_since
        with self.transaction(writes=True) as connection:
            if since is not None and since != _n_deletions(connection, entry.namespace):
                raise CacheMiss("absent", f"{entry.key}: something was deleted meanwhile")
            for limit, what, _ in _limits(connection, entry.namespace) if place else ():
                if entry.n_bytes > limit:
                    raise StoreError(
                        f"a cache of {entry.n_bytes} bytes is larger than {what}, {limit} bytes; "
                        "next step: samkv store budget, or a larger max_bytes"
                    )
            chunk = self._insert(connection, entry)
            self._evict(connection, entry.namespace, chunk if place else -1)
            if place:
                place()
            elif self._caches.is_gone(entry.digest, entry.key):
                raise CacheMiss("absent", f"{entry.key}: deleted meanwhile")

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take note of chunks that are in the remote tier, and not here."""
        with self.transaction(writes=True) as connection:
            for entry in entries:
                if self._caches.is_gone(entry.digest, entry.key):
                    chunk = self._insert(connection, entry)
                    connection.execute(
                        "UPDATE chunks SET state = ?, bytes = 0, is_shared = 1 WHERE id = ?",
                        [EVICTED, chunk],
                    )

    def _insert(self, connection: sqlite3.Connection, entry: Entry) -> int:
        connection.execute(
            "INSERT OR IGNORE INTO fingerprints VALUES(?, ?)",
            [entry.digest, json.dumps(entry.fields, sort_keys=True)],
        )
        (chunk,) = connection.execute(
            "INSERT INTO chunks(digest, key, namespace, bytes, state, used_at) "
            "VALUES(?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET bytes = excluded.bytes, "
            "state = excluded.state, used_at = excluded.used_at RETURNING id",
            [entry.digest, entry.key, entry.namespace, entry.n_bytes, PRESENT, entry.used_at],
        ).fetchone()
        ids, body = np.asarray(entry.token_ids, "<i4"), text_bytes(entry.text)
        connection.execute(
            "INSERT OR REPLACE INTO texts VALUES(?, ?, ?, ?, ?)",
            [chunk, entry.namespace, body, _same(entry.text), ids.tobytes()],
        )
        places = self.windows_of(entry.namespace, entry.digest).first_places(ids)
        connection.executemany(
            "INSERT OR IGNORE INTO windows VALUES(?, ?, ?)",
            [(hashed, chunk, at) for hashed, at in places.items()],
        )
        return int(chunk)

    def _evict(self, connection: sqlite3.Connection, namespace: str, but: int = -1) -> None:
        """Evict until the limits of a namespace hold; but: a chunk that stays."""
        for limit, _, space in list(_limits(connection, namespace)):
            of = "namespace = coalesce(?, namespace)"
            going, over = [], _taken(connection, space) - limit
            # beginnings first: each is a second cache of its chunk
            extra = _beginnings(connection, space)
            marks = ", ".join("?" * len(extra))
            oldest = connection.execute(
                "SELECT id, digest, key, namespace, bytes FROM chunks "
                f"WHERE state = ? AND {of} AND id != ? ORDER BY digest NOT IN ({marks}), used_at",
                [PRESENT, space, but, *extra],
            )
            while over > 0 and (found := oldest.fetchone()):
                going.append(found)
                over -= found[4]
            oldest.close()
            for chunk, digest, key, of_chunk, _ in going:
                self._caches.remove(digest, key)
                connection.execute(
                    "UPDATE chunks SET state = ?, bytes = 0 WHERE id = ?", [EVICTED, chunk]
                )
                if digest in extra:  # nobody will miss it
                    connection.execute("DELETE FROM texts WHERE id = ?", [chunk])
                    connection.execute("DELETE FROM chunks WHERE id = ?", [chunk])
                    continue
                _count(connection, of_chunk, digest, evictions=1)

    def lose(self, places: Iterable[Place], *, are_damaged: bool = False) -> None:
        """Take note that caches are not where they should be; their texts stay known.

        With a budget they count as evicted: a process that evicted them may have been killed.

        are_damaged: delete what is there.
        """
        with self.transaction(writes=True) as connection:
            (quotas,) = connection.execute("SELECT count(quota) FROM spaces").fetchone()
            has_budget = quotas or _setting(connection, "max_bytes") is not None
            state = EVICTED if has_budget and not are_damaged else LOST
            for digest, key in places:
                if are_damaged:
                    self._caches.remove(digest, key)
                if self._caches.is_gone(digest, key):
                    found = connection.execute(
                        "UPDATE chunks SET state = ?, bytes = 0 WHERE digest = ? AND key = ? "
                        "AND state = ? RETURNING namespace", [state, digest, key, PRESENT],
                    ).fetchall()  # fmt: skip
                    for (namespace,) in found if are_damaged else ():
                        _count(connection, namespace, digest, corrupt=1)

    def delete(self, namespace: str, keys: Iterable[str], state: int | None = None) -> set[str]:
        """Delete chunks, with caches and texts, of every fingerprint; the keys that there were.

        All beginnings of the namespace go along: any of them may hold what is deleted, as its chunk
        or in the prompt's head. They are made again where they are needed.

        state: of the chunks; None for any. With one, beginnings stay.
        """
        keys = list(dict.fromkeys(keys))
        with self.transaction(writes=True) as connection:
            gone = set()
            if state is None:
                _count_deletion(connection, namespace)
            for digest in _beginnings(connection, namespace) if keys and state is None else ():
                self._delete_beginnings(connection, digest)
            for key in keys:
                # "+": by key, as SQLite would go through all of a namespace
                found = connection.execute(
                    "SELECT id, digest, ids FROM chunks LEFT JOIN texts USING(id) WHERE key = ? "
                    "AND +chunks.namespace = ? AND state = coalesce(?, state)",
                    [key, namespace, state],
                ).fetchall()
                for chunk, digest, ids in found:
                    token_ids = np.frombuffer(ids, "<i4")
                    gone.add(key)
                    self._caches.remove(digest, key)
                    for hashed in self.windows_of(namespace, digest).first_places(token_ids):
                        connection.execute(
                            "DELETE FROM windows WHERE hash = ? AND chunk = ?", [hashed, chunk]
                        )
                    connection.execute("DELETE FROM texts WHERE id = ?", [chunk])
                    connection.execute("DELETE FROM chunks WHERE id = ?", [chunk])
            connection.execute(
                "DELETE FROM fingerprints WHERE digest NOT IN (SELECT digest FROM chunks)"
            )
            return gone

    def delete_beginnings(self, namespace: str) -> int:
        """Delete the beginnings of a namespace, see `Fingerprint.behind`; how many there were."""
        with self.transaction(writes=True) as connection:
            _count_deletion(connection, namespace)
            found = _beginnings(connection, namespace)
            return sum(self._delete_beginnings(connection, digest) for digest in found)

    def keep_heads(self, namespace: str, most: int) -> None:
        """Delete the beginnings of all heads of prompts but the ``most`` that were used last."""
        with self.transaction(writes=True, patience_s=BRIEF_S) as connection:
            found = _beginnings(connection, namespace)
            used_at = {
                digest: connection.execute(
                    "SELECT max(used_at) FROM chunks WHERE digest = ?", [digest]
                ).fetchone()[0]
                for digest in found
            }
            for digest in sorted(found, key=used_at.__getitem__, reverse=True)[most:]:
                self._delete_beginnings(connection, digest)

    def _delete_beginnings(self, connection: sqlite3.Connection, digest: str) -> int:
        self._caches.remove_all(digest)  # also what a killed writer did not tell the index
        of_digest = "SELECT id FROM chunks WHERE digest = ?"
        connection.execute(f"DELETE FROM texts WHERE id IN ({of_digest})", [digest])
        (n_there,) = connection.execute(
            "SELECT count(*) FROM chunks WHERE digest = ? AND state = ?", [digest, PRESENT]
        ).fetchone()
        for table in ("chunks", "counts", "fingerprints"):
            connection.execute(f"DELETE FROM {table} WHERE digest = ?", [digest])
        return int(n_there)

    def deletions(self, namespace: str) -> int:
        """How often something of a namespace was deleted, as far as the index remembers."""
        with self.transaction() as connection:
            return _n_deletions(connection, namespace)

    def has_room(self, namespace: str, n_bytes: int) -> bool:
        """Whether so many bytes more fit into the budgets, with nothing evicted.

        Raises StoreError, too, if another process keeps this one from writing for a moment.
        """
        with self.transaction(writes=True, patience_s=BRIEF_S) as connection:
            return all(
                _taken(connection, space) + n_bytes <= limit
                for limit, _, space in _limits(connection, namespace)
            )

    # -- budgets ----------------------------------------------------------------------------------

    def budget(self) -> tuple[int | None, dict[str, int]]:
        """What the caches of all, and of single namespaces, may take."""
        with self.transaction() as connection:
            quotas = connection.execute(
                "SELECT namespace, quota FROM spaces WHERE quota IS NOT NULL"
            )
            return _setting(connection, "max_bytes"), dict(quotas.fetchall())

    def set_budget(self, max_bytes: int | None, quota: Mapping[str, int]) -> None:
        """Write the budget down, and evict until it holds.

        Raises InvalidOption if a value is no number of bytes.
        """
        for name, value in (("max_bytes", max_bytes), *quota.items()):
            if value is not None and (type(value) is not int or not 1 <= value <= MOST):
                raise InvalidOption(
                    f"{name}={value!r:.40}; a budget is a number of bytes, 1 to 2^63 - 1; "
                    "None for no limit"
                )
        with self.transaction(writes=True) as connection:
            connection.execute("REPLACE INTO settings VALUES('max_bytes', ?)", [max_bytes])
            connection.execute("UPDATE spaces SET quota = NULL")
            connection.executemany(
                "INSERT INTO spaces(namespace, quota) VALUES(?, ?) "
                "ON CONFLICT DO UPDATE SET quota = excluded.quota", quota.items(),
            )  # fmt: skip
        # Another transaction: who is killed here leaves a budget by which what went was evicted.
        with self.transaction(writes=True) as connection:
            for (namespace,) in connection.execute("SELECT namespace FROM spaces").fetchall():
                self._evict(connection, namespace)

    # -- what requests used -----------------------------------------------------------------------

    def record(
        self, namespace: str, digest: str, used: Sequence[str], missed: Sequence[str] = (),
        *, are_counted: bool = True,
    ) -> int:  # fmt: skip
        """Take note of the caches that a request used and missed; how many of the used are known.

        are_counted: in hits and misses.
        """
        with self.transaction(writes=True, patience_s=BRIEF_S) as connection:
            now, n_known = time.time(), 0
            for key in used:
                n_known += connection.execute(
                    "UPDATE chunks SET used_at = ? WHERE key = ? AND digest = ? AND state = ?",
                    [now, key, digest, PRESENT],
                ).rowcount
            if are_counted:
                _count(connection, namespace, digest, hits=len(used), misses=len(missed))
            return n_known

    def keys(
        self, namespace: str, fingerprint: Fingerprint | None, *, are_present: bool = False
    ) -> list[str]:
        """Sorted keys of the chunks that there is a text of; are_present: and a cache.

        Without a fingerprint those of all, but for beginnings.
        """
        with self.transaction() as connection:
            rows = connection.execute(
                "SELECT DISTINCT key, digest FROM chunks WHERE namespace = ? AND "
                "digest = coalesce(?, digest) AND state = coalesce(?, state) ORDER BY key",
                [namespace, fingerprint and fingerprint.digest, PRESENT if are_present else None],
            ).fetchall()
            left_out = set() if fingerprint else set(_beginnings(connection, namespace))
        return list(dict.fromkeys(key for key, digest in rows if digest not in left_out))

    def places(self, namespace: str | None = None, *states: int) -> list[tuple[str, str, str]]:
        """(digest, key, namespace) of chunks in these states, those used last first."""
        marks = ", ".join("?" * len(states))
        return self.rows(
            "SELECT digest, key, namespace FROM chunks WHERE namespace = coalesce(?, namespace) "
            f"AND state IN ({marks}) ORDER BY used_at DESC", namespace, *states,
        )  # fmt: skip

    def state(self, digest: str, key: str) -> tuple[int | None, float]:
        """The state of a chunk, None if it is unknown, and when its cache was put or used last."""
        sql = "SELECT state, used_at FROM chunks WHERE key = ? AND digest = ?"
        return next(iter(self.rows(sql, key, digest)), (None, 0.0))

    # -- texts ------------------------------------------------------------------------------------

    def texts(self, namespace: str, key: str | None = None) -> list[tuple[str, str, str]]:
        """(digest, key, text) of every chunk, or of those of a key."""
        with self.transaction() as connection:
            # "+": by key, as SQLite would go through all of a namespace
            rows = connection.execute(
                "SELECT digest, key, body FROM chunks LEFT JOIN texts USING(id) WHERE "
                + ("chunks.namespace = ?" if key is None else "+chunks.namespace = ? AND key = ?"),
                [namespace] if key is None else [namespace, key],
            )
            return [
                (digest, key, body.decode(errors="surrogatepass")) for digest, key, body in rows
            ]

    def same_texts(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """See `Store.same_texts`."""
        with self.transaction() as connection:
            found = set(keys)
            for key in keys:
                alike = connection.execute(
                    "SELECT key FROM chunks JOIN texts USING(id) WHERE texts.namespace = ?1 AND "
                    "same IN (SELECT same FROM chunks JOIN texts USING(id) WHERE key = ?2 "
                    "AND +chunks.namespace = ?1)", [namespace, key],
                )  # fmt: skip
                found |= {of_one for (of_one,) in alike}
            return found

    # -- the remote tier --------------------------------------------------------------------------

    def shared(self, namespace: str) -> set[Place]:
        """Chunks that were in the remote tier when this machine looked last."""
        sql = "SELECT digest, key FROM chunks WHERE namespace = ? AND is_shared"
        return set(self.rows(sql, namespace))

    def mark_shared(self, namespace: str, places: Collection[Place]) -> None:
        """Take note that chunks are in the remote tier."""
        sql = "UPDATE chunks SET is_shared = 1 WHERE digest = ? AND key = ? AND namespace = ?"
        with self.transaction(writes=True) as connection:
            connection.executemany(sql, [(*place, namespace) for place in places])

    def unshare(self, namespace: str) -> None:
        """Forget that chunks are in the remote tier, which is another one now."""
        with self.transaction(writes=True) as connection:
            connection.execute("UPDATE chunks SET is_shared = 0 WHERE namespace = ?", [namespace])

    # -- what does not change ---------------------------------------------------------------------

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """A setting; None if it was never written down."""
        with self.transaction() as connection:
            return _setting(connection, name)

    def set(self, name: str, value: int | str, *, replace: bool = True) -> bool:
        """Write a setting down; whether it was. replace: in place of what there is."""
        sql = f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO settings VALUES(?, ?)"
        with self.transaction(writes=True) as connection:
            return connection.execute(sql, [name, value]).rowcount > 0

    def agree(self, name: str, value: int) -> int:
        """The value of a setting: that of who was first."""
        known = self.setting(name)
        if known is None:
            self.set(name, value, replace=False)
            known = self.setting(name)
        return int(known)

    def fingerprints(
        self, namespace: str | None = None, *, are_present: bool = True
    ) -> list[Fingerprint]:
        """Those with a chunk, sorted by digest; are_present: and with a cache."""
        with self.transaction() as connection:
            rows = connection.execute(
                "SELECT fields FROM fingerprints WHERE digest IN (SELECT digest FROM chunks "
                "WHERE state = coalesce(?, state) AND namespace = coalesce(?, namespace)) "
                "ORDER BY digest",
                [PRESENT if are_present else None, namespace],
            )
            return [Fingerprint(**json.loads(fields)) for (fields,) in rows]

    def totals(self, namespace: str | None) -> list[tuple[str, str, int, int, int, int, int, int]]:
        """Of each namespace and fingerprint with a cache, in all namespaces for None.

        Namespace, digest, chunks, bytes, hits, misses, evictions and damaged ones.
        """
        return self.rows(
            "SELECT namespace, digest, count(*), sum(bytes), coalesce(hits, 0), "
            "coalesce(misses, 0), coalesce(evictions, 0), coalesce(corrupt, 0) "
            "FROM chunks LEFT JOIN counts USING(namespace, digest) WHERE state = ? "
            "AND namespace = coalesce(?, namespace) GROUP BY namespace, digest",
            PRESENT, namespace,
        )  # fmt: skip


class IndexedChunks:
    """The chunks of a namespace and a fingerprint as a `ChunkIndex`, with a cache or without one.

    Methods raise StoreError as those of `Index` do.
    """

    def __init__(self, index: Index, namespace: str, digest: str) -> None:
        self._index, self._names = index, (namespace, digest)
        self.windows = index.windows_of(namespace, digest)

    def find(self, hashes: Iterable[int]) -> Found:
        # The hash is keyed by both names; the join makes sure of it. CROSS and "+": windows first.
        of_one = (
            "SELECT key, at, chunk FROM windows CROSS JOIN chunks ON id = chunk "
            f"WHERE hash = ? AND +namespace = ? AND +digest = ? LIMIT {MAX_PLACES}"
        )
        places: dict[int, list[Window]] = {}
        ids: dict[str, Ids] = {}
        with self._index.transaction() as connection:
            for hashed in hashes:
                for key, at, chunk in connection.execute(of_one, (hashed, *self._names)):
                    places.setdefault(hashed, []).append((key, at))
                    if key not in ids:
                        of_chunk = "SELECT ids FROM texts WHERE id = ?"
                        (data,) = connection.execute(of_chunk, [chunk]).fetchone()
                        ids[key] = np.frombuffer(data, "<i4")
        return places, ids


def _connect(name: str, patience_s: float = _BUSY_S) -> sqlite3.Connection:
    connection = sqlite3.connect(
        name, timeout=patience_s, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA synchronous=OFF")  # what a power cut damages is made anew
    return connection


def _is_damage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a string that is no text, or a value that is none of ours
        return isinstance(error, (sqlite3.OperationalError, *_BAD_ROWS))
    return bool(code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_READONLY_DBMOVED)


def _same(text: str) -> bytes:
    """Names a body: two chunks have the same one if these are the same."""
    return hashlib.blake2b(text_bytes(normalise(text)), digest_size=16).digest()


def _limits(
    connection: sqlite3.Connection, namespace: str
) -> Iterator[tuple[int, str, str | None]]:
    """Limits that the caches of a namespace keep to: bytes, name, and the namespace or all."""
    quota = connection.execute(
        "SELECT quota FROM spaces WHERE namespace = ?", [namespace]
    ).fetchone()
    if quota and quota[0] is not None:
        yield quota[0], f"the quota of namespace {namespace!r}", namespace
    if (most := _setting(connection, "max_bytes")) is not None:
        yield most, "the store's max_bytes", None


def _taken(connection: sqlite3.Connection, namespace: str | None) -> int:
    """Bytes of the caches of a namespace; None for all."""
    sql = "SELECT coalesce(sum(bytes), 0) FROM spaces WHERE namespace = coalesce(?, namespace)"
    (taken,) = connection.execute(sql, [namespace]).fetchone()
    return int(taken)


def _n_deletions(connection: sqlite3.Connection, namespace: str) -> int:
    return int(_setting(connection, f"deletions {namespace}") or 0)


def _count_deletion(connection: sqlite3.Connection, namespace: str) -> None:
    connection.execute(
        "REPLACE INTO settings VALUES(?, ?)",
        [f"deletions {namespace}", _n_deletions(connection, namespace) + 1],
    )


def _beginnings(connection: sqlite3.Connection, namespace: str | None) -> list[str]:
    """Digests of the fingerprints of a namespace's beginnings; None for those of all."""
    rows = connection.execute(
        "SELECT digest, fields FROM fingerprints WHERE digest IN "
        "(SELECT digest FROM chunks WHERE namespace = coalesce(?, namespace))", [namespace],
    )  # fmt: skip
    found = rows.fetchall()
    return [digest for digest, fields in found if f'"prefix": "{BEHIND}' in fields]


def _count(connection: sqlite3.Connection, namespace: str, digest: str, **more: int) -> None:
    """Add to the counts ``hits``, ``misses``, ``evictions`` or ``corrupt``."""
    connection.execute(
        "INSERT OR IGNORE INTO counts(namespace, digest) VALUES(?, ?)", [namespace, digest]
    )
    for name, number in more.items():
        connection.execute(
            f"UPDATE counts SET {name} = {name} + ? WHERE namespace = ? AND digest = ?",
            [number, namespace, digest],
        )


def _setting(connection: sqlite3.Connection, name: str) -> Any:  # noqa: ANN401
    found = connection.execute("SELECT value FROM settings WHERE name = ?", [name]).fetchone()
    return found[0] if found else None

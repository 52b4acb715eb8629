"""The index of a store: which chunks there are, their sizes, use, texts and token ids.

The chunk files are the truth, and a cache is read without the index. The index is derived from the
files, and rebuilt if it is missing or damaged. Data that the files lack is then lost: texts of
evicted caches, the budget, the agreed block size, and counts of hits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from samkv_integrations.errors import CacheMiss, StoreError
from samkv_integrations.store.chunk import ChunkCache, Fingerprint, normalise
from samkv_integrations.store.chunk_file import ChunkFile, FileLayout, text_bytes
from samkv_integrations.store.database import BRIEF_S, Database
from samkv_integrations.store.windows import MAX_PLACES, Found, Ids, Window, Windows

PRESENT, EVICTED, LOST = range(3)
"""States of a chunk. EVICTED: its cache was evicted, or is in the remote tier only. LOST: its cache
was missing or damaged. The text of all of them is known."""

Place = tuple[str, str]
"""Digest of the fingerprint, and key, of a chunk."""

# `texts`: text and token ids of each chunk; `same` is a hash of the body. `windows`: where hashes
# of token ids first occur.
_SCHEMA = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value ANY) WITHOUT ROWID, STRICT;
CREATE TABLE fingerprints(
  digest TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE chunks(
  id INTEGER PRIMARY KEY, digest TEXT NOT NULL, key TEXT NOT NULL, namespace TEXT NOT NULL,
  bytes INTEGER NOT NULL, state INTEGER NOT NULL, used_at REAL NOT NULL,
  is_shared INTEGER NOT NULL DEFAULT 0, UNIQUE(key, digest)) STRICT;
CREATE INDEX chunks_used ON chunks(state, used_at);
CREATE INDEX chunks_of ON chunks(namespace, state, digest, bytes);
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
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The data of a cache in the index: `of` a cache that is about to be put, or `of_file`."""

    fingerprint: Fingerprint
    key: str
    namespace: str
    text: str
    token_ids: Sequence[int]
    n_bytes: int
    used_at: float

    @classmethod
    def of(cls, chunk: ChunkCache, namespace: str) -> Entry:
        layout = FileLayout.of_cache(chunk, namespace)
        return cls(
            fingerprint=chunk.fingerprint, key=chunk.key, namespace=namespace, text=chunk.text,
            token_ids=chunk.token_ids.tolist(), n_bytes=layout.file_size(chunk.key),
            used_at=time.time(),
        )  # fmt: skip

    @classmethod
    def of_file(cls, file: ChunkFile) -> Entry:
        return cls(
            fingerprint=file.layout.fingerprint, key=file.key, namespace=file.layout.namespace,
            text=file.text(), token_ids=file.token_ids.tolist(), used_at=file.modified_at,
            n_bytes=file.layout.file_size(file.key),
        )  # fmt: skip

    @property
    def digest(self) -> str:
        return self.fingerprint.digest


class Caches(Protocol):
    """The caches that an index describes: files in a folder, or caches in memory."""

    def entries(self) -> Iterable[Entry]:
        """All sound caches; asked when the index is built."""

    def is_gone(self, digest: str, key: str) -> bool:
        """Whether there is no cache of a chunk."""

    def remove(self, digest: str, key: str) -> None:
        """Delete the cache of a chunk, if there is one. Raises StoreError."""


class Index(Database):
    """The index of a store. Every method raises StoreError if the database cannot be used.

    folder: of the store; None for an index in memory. caches: the caches to index. secret: of the
    store; hashes of token ids are keyed with it.
    """

    def __init__(self, folder: Path | None, caches: Caches, secret: bytes) -> None:
        super().__init__(folder, _SCHEMA)
        self._caches = caches
        # not a cached method, which would keep the index alive
        self.windows_of = lru_cache(64)(lambda space, digest: Windows(secret, space, digest))

    def fill(self, connection: sqlite3.Connection) -> None:
        """Index all caches that there are."""
        connection.execute("INSERT INTO settings VALUES('made', ?)", [secrets.randbits(62)])
        for entry in self._caches.entries():
            self._insert(connection, entry)

    # -- adding caches ----------------------------------------------------------------------------

    @contextmanager
    def keep(self, entry: Entry, unless_deleted_since: int | None = None) -> Iterator[None]:
        """A block that puts a cache in its place, while no other process evicts or deletes.

        The cache is indexed, and the caches used least recently are evicted to make room for it.

        unless_deleted_since: `deletions` before the cache was computed.

        Raises StoreError if there is no room, CacheMiss ("absent") if something was deleted since.
        """
        with self.transaction(writes=True) as connection:
            if unless_deleted_since not in (None, self.deletions(entry.namespace)):
                raise CacheMiss("absent", f"{entry.key}: something was deleted meanwhile")
            for limit, what, _ in self._limits(entry.namespace):
                if entry.n_bytes > limit:
                    raise StoreError(
                        f"a cache of {entry.n_bytes} bytes is larger than {what}, {limit} bytes; "
                        "next step: samkv store budget, or a larger max_bytes"
                    )
            self._evict(entry.namespace, self._insert(connection, entry))
            yield

    def adopt(self, entry: Entry) -> None:
        """Index a cache that is in its place, or delete it if there is no room for it.

        Raises CacheMiss ("absent") if it is no longer there.
        """
        with self.transaction(writes=True) as connection:
            if self.has(entry.digest, entry.key):
                return  # its writer has indexed it meanwhile
            for limit, _, limited in self._limits(entry.namespace):
                if self._taken(limited) + entry.n_bytes > limit:
                    self._caches.remove(entry.digest, entry.key)
                    raise CacheMiss("absent", f"{entry.key}: no room")
            self._insert(connection, entry)
            if self._caches.is_gone(entry.digest, entry.key):
                raise CacheMiss("absent", f"{entry.key}: deleted meanwhile")

    def learn(self, entries: Iterable[Entry]) -> None:
        """Index chunks that only the remote tier has."""
        with self.transaction(writes=True) as connection:
            for entry in entries:
                if self._caches.is_gone(entry.digest, entry.key):
                    self._insert(connection, entry, is_here=False)

    def _insert(self, connection: sqlite3.Connection, entry: Entry, *, is_here: bool = True) -> int:
        """Index a cache; returns the id of its row in ``chunks``."""
        connection.execute(
            "INSERT OR IGNORE INTO fingerprints VALUES(?, ?)",
            [entry.digest, json.dumps(asdict(entry.fingerprint), sort_keys=True)],
        )
        n_bytes, state = (entry.n_bytes, PRESENT) if is_here else (0, EVICTED)
        (chunk,) = connection.execute(
            "INSERT INTO chunks(digest, key, namespace, bytes, state, used_at, is_shared) "
            "VALUES(?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET bytes = excluded.bytes, "
            "state = excluded.state, used_at = excluded.used_at, "
            "is_shared = max(is_shared, excluded.is_shared) RETURNING id",
            [entry.digest, entry.key, entry.namespace, n_bytes, state, entry.used_at,
             int(not is_here)],
        ).fetchone()  # fmt: skip
        ids, body = np.asarray(entry.token_ids, "<i4"), text_bytes(entry.text)
        same = hashlib.blake2b(text_bytes(normalise(entry.text)), digest_size=16).digest()
        connection.execute(
            "INSERT OR REPLACE INTO texts VALUES(?, ?, ?, ?, ?)",
            [chunk, entry.namespace, body, same, ids.tobytes()],
        )
        places = self.windows_of(entry.namespace, entry.digest).first_places(ids)
        connection.executemany(
            "INSERT OR IGNORE INTO windows VALUES(?, ?, ?)",
            [(hashed, chunk, at) for hashed, at in places.items()],
        )
        return int(chunk)

    # -- deleting caches --------------------------------------------------------------------------

    def _evict(self, namespace: str, kept: int = -1) -> None:
        """Evict caches until the limits of a namespace hold. kept: the id of a chunk to keep."""
        for limit, _, space in self._limits(namespace):
            over = self._taken(space) - limit
            while over > 0:
                oldest = self.rows(
                    "SELECT id, digest, key, namespace, bytes FROM chunks WHERE state = ? "
                    "AND namespace = coalesce(?, namespace) AND id != ? ORDER BY used_at LIMIT 1",
                    PRESENT, space, kept,
                )  # fmt: skip
                if not oldest:
                    break
                chunk, digest, key, of_chunk, n_bytes = oldest[0]
                self._caches.remove(digest, key)
                self.rows("UPDATE chunks SET state = ?, bytes = 0 WHERE id = ?", EVICTED, chunk)
                self._count(of_chunk, digest, evictions=1)
                over -= n_bytes

    def lose(self, places: Iterable[Place], *, are_damaged: bool = False) -> None:
        """Note that caches are missing, or delete damaged ones. Their texts stay known."""
        with self.transaction(writes=True):
            # With a budget a missing cache counts as evicted: the process that evicted it may have
            # been killed before it told the index.
            state = EVICTED if any(self.budget()) and not are_damaged else LOST
            for digest, key in places:
                if are_damaged:
                    self._caches.remove(digest, key)
                if self._caches.is_gone(digest, key):
                    found = self.rows(
                        "UPDATE chunks SET state = ?, bytes = 0 WHERE digest = ? AND key = ? "
                        "AND state = ? RETURNING namespace", state, digest, key, PRESENT,
                    )  # fmt: skip
                    for (namespace,) in found if are_damaged else ():
                        self._count(namespace, digest, corrupt=1)

    def compare(self, file: ChunkFile) -> None:
        """Raises StoreError, and rebuilds the index, if its token ids differ from a file's."""
        sql = "SELECT ids FROM chunks JOIN texts USING(id) WHERE key = ? AND digest = ?"
        with self.transaction() as connection:
            for (ids,) in connection.execute(sql, [file.key, file.layout.fingerprint.digest]):
                if ids and np.frombuffer(ids, "<i4").tolist() != file.token_ids.tolist():
                    raise ValueError(f"it holds other tokens of chunk {file.key} than its file")

    def delete(self, namespace: str, keys: Iterable[str], state: int | None = None) -> set[str]:
        """Delete chunks of every fingerprint, with caches and texts; returns the keys that existed.

        Caches whose computation began before are not kept, see `deletions`. state: of the chunks;
        None for any.
        """
        gone = set()
        with self.transaction(writes=True) as connection:
            self.set(f"deletion {namespace}", secrets.randbits(62))
            for key in dict.fromkeys(keys):
                # with "+" SQLite looks up the key, and does not scan the namespace
                for chunk, digest, ids in self.rows(
                    "SELECT id, digest, ids FROM chunks LEFT JOIN texts USING(id) WHERE key = ? "
                    "AND +chunks.namespace = ? AND state = coalesce(?, state)",
                    key, namespace, state,
                ):  # fmt: skip
                    token_ids = np.frombuffer(ids, "<i4")
                    gone.add(key)
                    self._caches.remove(digest, key)
                    connection.executemany(
                        "DELETE FROM windows WHERE hash = ? AND chunk = ?",
                        [(hashed, chunk)
                         for hashed in self.windows_of(namespace, digest).first_places(token_ids)],
                    )  # fmt: skip
                    for table in ("texts", "chunks"):
                        self.rows(f"DELETE FROM {table} WHERE id = ?", chunk)
            self.rows("DELETE FROM fingerprints WHERE digest NOT IN (SELECT digest FROM chunks)")
        return gone

    def deletions(self, namespace: str) -> int:
        """A number that changes with every deletion in a namespace, and if the index is rebuilt."""
        with self.transaction():
            last = self.setting(f"deletion {namespace}")  # a random number
            return int(self.setting("made") if last is None else last)

    # -- budgets ----------------------------------------------------------------------------------

    def budget(self) -> tuple[int | None, dict[str, int]]:
        """The most bytes of all caches, and of the caches of single namespaces."""
        found = dict(self.rows("SELECT name, value FROM settings WHERE name GLOB 'quota *'"))
        quota = {name.removeprefix("quota "): value for name, value in found.items()}
        return self.setting("max_bytes"), quota

    def set_budget(self, max_bytes: int | None, quota: Mapping[str, int]) -> None:
        """Set the budget, and evict until it holds."""
        with self.transaction(writes=True):
            self.rows("DELETE FROM settings WHERE name GLOB 'quota *'")
            self.set("max_bytes", max_bytes)
            for name, limit in quota.items():
                self.set(f"quota {name}", limit)
        # A second transaction: if this process is killed while it evicts, the budget is set.
        with self.transaction(writes=True):
            for (namespace,) in self.rows("SELECT DISTINCT namespace FROM chunks"):
                self._evict(namespace)

    def free_bytes(self, namespace: str) -> int | None:
        """Bytes that caches of a namespace may still take; None if there is no limit."""
        left = [limit - self._taken(space) for limit, _, space in self._limits(namespace)]
        return max(0, min(left)) if left else None

    def _limits(self, namespace: str) -> list[tuple[int, str, str | None]]:
        """Limits that a namespace must keep: bytes, name, limited namespace (None for all)."""
        quota, most = self.setting(f"quota {namespace}"), self.setting("max_bytes")
        limits = (
            (quota, f"the quota of namespace {namespace!r}", namespace),
            (most, "the store's max_bytes", None),
        )
        return [limit for limit in limits if limit[0] is not None]

    def _taken(self, namespace: str | None) -> int:
        """Bytes of the caches of a namespace; None for all."""
        sql = "SELECT coalesce(sum(bytes), 0) FROM chunks WHERE namespace = coalesce(?, namespace)"
        return int(self.rows(sql, namespace)[0][0])

    # -- use --------------------------------------------------------------------------------------

    def record(
        self, namespace: str, digest: str, used: Sequence[str], missed: Sequence[str] = ()
    ) -> None:
        """See `Store.record`."""
        with self.transaction(writes=True, patience_s=BRIEF_S):
            self.touch(digest, *used)
            self._count(namespace, digest, hits=len(used), misses=len(missed))
            if missed:
                self.lose([(digest, key) for key in missed])

    def touch(self, digest: str, *keys: str) -> None:
        """Note that caches are used now."""
        with self.transaction(writes=True, patience_s=BRIEF_S):
            for key in keys:
                sql = "UPDATE chunks SET used_at = ? WHERE key = ? AND digest = ?"
                self.rows(sql, time.time(), key, digest)

    def _count(self, namespace: str, digest: str, **more: int) -> None:
        """Add to the counts ``hits``, ``misses``, ``evictions`` or ``corrupt``."""
        for name, number in more.items():
            self.rows(
                f"INSERT INTO counts(namespace, digest, {name}) VALUES(?, ?, ?) "
                f"ON CONFLICT DO UPDATE SET {name} = {name} + excluded.{name}",
                namespace, digest, number,
            )  # fmt: skip

    # -- the chunks that there are ----------------------------------------------------------------

    def keys(
        self, namespace: str, fingerprint: Fingerprint | None, *, are_present: bool = False
    ) -> list[str]:
        """Sorted keys of the chunks whose text is known.

        fingerprint: None for all. are_present: whether they must have a cache.
        """
        rows = self.rows(
            "SELECT DISTINCT key FROM chunks WHERE namespace = ? AND state = coalesce(?, state) "
            "AND digest = coalesce(?, digest) ORDER BY key",
            namespace, PRESENT if are_present else None, fingerprint and fingerprint.digest,
        )  # fmt: skip
        return [key for (key,) in rows]

    def places(self, namespace: str | None, *states: int) -> list[tuple[str, str, str]]:
        """(digest, key, namespace) of the chunks in these states, those used last first.

        namespace: None for all.
        """
        marks = ", ".join("?" * len(states))
        return self.rows(
            "SELECT digest, key, namespace FROM chunks WHERE namespace = coalesce(?, namespace) "
            f"AND state IN ({marks}) ORDER BY used_at DESC", namespace, *states,
        )  # fmt: skip

    def has(self, digest: str, key: str) -> bool:
        """Whether a chunk has a cache."""
        return self.state(digest, key)[0] == PRESENT and not self._caches.is_gone(digest, key)

    def state(self, digest: str, key: str) -> tuple[int | None, float]:
        """The state of a chunk, None if it is unknown, and when its cache was put or used last."""
        sql = "SELECT state, used_at FROM chunks WHERE key = ? AND digest = ?"
        return next(iter(self.rows(sql, key, digest)), (None, 0.0))

    def texts(self, namespace: str, key: str | None = None) -> list[tuple[str, str, str]]:
        """(digest, key, text) of every chunk, or of those with this key."""
        # "+" as in `delete`
        where = "chunks.namespace = ?" if key is None else "+chunks.namespace = ? AND key = ?"
        sql = f"SELECT digest, key, body FROM chunks LEFT JOIN texts USING(id) WHERE {where}"
        with self.transaction():
            rows = self.rows(sql, *([namespace] if key is None else [namespace, key]))
            return [(digest, k, body.decode(errors="surrogatepass")) for digest, k, body in rows]

    def same_texts(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """See `IndexedStore.same_texts`."""
        alike = (
            "SELECT key FROM chunks JOIN texts USING(id) WHERE texts.namespace = ?1 AND same IN "
            "(SELECT same FROM chunks JOIN texts USING(id) WHERE key = ?2 "
            "AND +chunks.namespace = ?1)"
        )
        found = set(keys)
        with self.transaction():
            for key in keys:
                found |= {of_one for (of_one,) in self.rows(alike, namespace, key)}
        return found

    def fingerprints(self, namespace: str | None = None) -> list[Fingerprint]:
        """The fingerprints of known chunks, by digest. namespace: None for all."""
        with self.transaction():
            rows = self.rows(
                "SELECT fields FROM fingerprints WHERE digest IN (SELECT digest FROM chunks "
                "WHERE namespace = coalesce(?, namespace)) ORDER BY digest", namespace,
            )  # fmt: skip
            return [Fingerprint(**json.loads(fields)) for (fields,) in rows]

    def totals(self, namespace: str | None) -> list[tuple[str, str, int, int, int, int, int, int]]:
        """Namespace, digest, chunks, bytes, hits, misses, evictions and damaged caches."""
        return self.rows(
            "SELECT namespace, digest, count(*), sum(bytes), coalesce(hits, 0), "
            "coalesce(misses, 0), coalesce(evictions, 0), coalesce(corrupt, 0) "
            "FROM chunks LEFT JOIN counts USING(namespace, digest) WHERE state = ? "
            "AND namespace = coalesce(?, namespace) GROUP BY namespace, digest",
            PRESENT, namespace,
        )  # fmt: skip

    # -- the remote tier --------------------------------------------------------------------------

    def shared(self, namespace: str) -> set[Place]:
        """Chunks that were in the remote tier when this machine last listed it."""
        sql = "SELECT digest, key FROM chunks WHERE namespace = ? AND is_shared"
        return set(self.rows(sql, namespace))

    def is_shared(self, digest: str, key: str) -> bool:
        """Whether a chunk was in the remote tier when this machine last looked."""
        sql = "SELECT is_shared FROM chunks WHERE key = ? AND digest = ?"
        return self.rows(sql, key, digest) == [(1,)]

    def mark_shared(self, namespace: str, places: Collection[Place]) -> bool:
        """Note that chunks are in the remote tier; returns whether one of them is known here."""
        sql = "UPDATE chunks SET is_shared = 1 WHERE digest = ? AND key = ? AND namespace = ?"
        with self.transaction(writes=True) as connection:
            marked = connection.executemany(sql, [(*place, namespace) for place in places])
            return marked.rowcount > 0

    def unshare(self, namespace: str) -> None:
        """Forget which chunks are in the remote tier."""
        with self.transaction(writes=True):
            self.rows("UPDATE chunks SET is_shared = 0 WHERE namespace = ?", namespace)

    # -- settings ---------------------------------------------------------------------------------

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """The value of a setting; None if it was never set."""
        found = self.rows("SELECT value FROM settings WHERE name = ?", name)
        return found[0][0] if found else None

    def set(self, name: str, value: int | str | None, *, replace: bool = True) -> bool:
        """Set a value; returns whether it was set. replace: whether to replace an earlier one."""
        sql = f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO settings VALUES(?, ?)"
        with self.transaction(writes=True) as connection:
            return connection.execute(sql, [name, value]).rowcount > 0


class IndexedChunks:
    """The chunks of a namespace and a fingerprint as a `ChunkIndex`, with or without a cache."""

    def __init__(self, index: Index, namespace: str, digest: str) -> None:
        self._index, self._names = index, (namespace, digest)
        self.windows = index.windows_of(namespace, digest)

    def find(self, hashes: Iterable[int]) -> Found:
        # The hash is keyed with both names. With CROSS and "+" SQLite begins with `windows`.
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

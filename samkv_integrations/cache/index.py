"""The index of a folder of chunk caches: bytes, recency, texts and counts, in SQLite.

The chunk files are the truth, and reading a cache does not ask the index. It knows what takes a
look at every file to find out: what all of them take, which was used last, and their token ids.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from samkv_integrations.cache import tables
from samkv_integrations.cache.budget import Budget
from samkv_integrations.cache.database import Database
from samkv_integrations.cache.tables import DELETED, EVICTED, LOST, PRESENT, Entry
from samkv_integrations.cache.windows import MAX_PLACES, Ids, Place, Windows

_PATIENCE_S = 1.0
"""For notes that a question leaves, and does not need."""


class Index:
    """What a folder of chunk caches holds; every method raises StoreError if it cannot be used.

    Args:
        folder: of the store.
        entries: all chunk files that are there, read when an index has to be made.
        secret: of the store, which hashes of token ids are keyed with.
    """

    def __init__(self, folder: Path, entries: Callable[[], Iterable[Entry]], secret: bytes) -> None:
        # a function of its own, as caching a method would keep the index alive
        self.windows_of = lru_cache(64)(lambda space, digest: Windows(secret, space, digest))

        def fill(connection: sqlite3.Connection) -> None:
            for entry in entries():
                tables.keep(connection, entry, self.windows_of)

        self.database = Database(folder, tables.SCHEMA, fill)
        self.budget = Budget(self.database)

    # -- chunks -------------------------------------------------------------------------------

    def keep(
        self,
        entry: Entry,
        temporary: str = "",
        *,
        is_gone: Callable[[str, str], bool] = lambda digest, key: False,
    ) -> None:
        """Take note of a file that is there, and which was `pending` as ``temporary``.

        is_gone: looks again, as another process may have deleted it, and its text must not come
            back then.
        """

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM pending WHERE temporary = ?", [temporary])
            if not is_gone(entry.digest, entry.key):
                tables.keep(connection, entry, self.windows_of)

        self.database.write(work)

    def keys(self, namespace: str, digest: str | None) -> list[str]:
        """Sorted keys of the chunks that are there."""
        rows = self.database.read(
            lambda c: c.execute(
                "SELECT DISTINCT key FROM chunks WHERE namespace = ? AND state = ? "
                "AND digest = coalesce(?, digest) ORDER BY key",
                [namespace, PRESENT, digest],
            ).fetchall()
        )
        return [key for (key,) in rows]

    def same_texts(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """See `Store.same_texts`."""
        return self.database.read(lambda c: tables.same_texts(c, namespace, keys))

    def places(self, namespace: str | None = None, *states: int) -> list[tuple[str, str, str]]:
        """(digest, key, namespace) of chunks in these states, those used last first."""
        marks = ", ".join("?" * len(states))
        return self.database.read(
            lambda c: c.execute(
                "SELECT digest, key, namespace FROM chunks "
                "WHERE namespace = coalesce(?, namespace) "
                f"AND state IN ({marks}) ORDER BY used_at DESC",
                [namespace, *states],
            ).fetchall()
        )

    def state(self, digest: str, key: str) -> int | None:
        found = self.database.read(
            lambda c: c.execute(
                "SELECT state FROM chunks WHERE digest = ? AND key = ?", [digest, key]
            ).fetchone()
        )
        return found[0] if found else None

    def lose(self, places: Iterable[tuple[str, str]], is_gone: Callable[[str, str], bool]) -> None:
        """Take note that files are not where they should be; their texts stay known.

        With a budget they count as evicted: a process that evicted them may have been killed.

        is_gone: looks again, while no other process takes note of one.
        """

        def work(connection: sqlite3.Connection) -> None:
            lost = EVICTED if tables.has_budget(connection) else LOST
            connection.executemany(
                "UPDATE chunks SET state = ?, bytes = 0 WHERE digest = ? AND key = ? AND state = ?",
                [(lost, *place, PRESENT) for place in places if is_gone(*place)],
            )

        self.database.write(work)

    def least_used(self, count: int) -> list[tuple[str, str]]:
        """(digest, key) of the chunks that are evicted next."""
        return self.database.read(
            lambda c: c.execute(
                "SELECT digest, key FROM chunks WHERE state = ? ORDER BY used_at LIMIT ?",
                [PRESENT, count],
            ).fetchall()
        )

    def begin_to_delete(
        self, namespace: str, keys: Sequence[str], digest: str | None = None
    ) -> list[tuple[str, str]]:
        """Delete the texts of chunks, for good; (digest, key) of the files that go next.

        Among them are files that could not be deleted before, though their texts were.
        """

        def work(connection: sqlite3.Connection) -> list[tuple[str, str]]:
            found = []
            for key in keys:
                of_key = [namespace, key, digest]
                # "+": by key, as SQLite would go through all of a namespace
                clause = "WHERE +namespace = ? AND key = ? AND digest = coalesce(?, digest)"
                by_key = f"{clause} AND digest IN (SELECT digest FROM fingerprints)"
                connection.execute(f"UPDATE chunks SET state = {DELETED} {by_key}", of_key)
                found += connection.execute(
                    f"SELECT digest, key FROM chunks {by_key}", of_key
                ).fetchall()
                tables.forget_texts(connection, clause, of_key, self.windows_of)
            before = "SELECT digest, key FROM chunks WHERE namespace = ? AND state = ?"
            found += connection.execute(before, [namespace, DELETED]).fetchall()
            return list(dict.fromkeys(found))

        return self.database.write(work)

    def end_deleting(
        self,
        places: Sequence[tuple[str, str]],
        is_gone: Callable[[str, str], bool] = lambda digest, key: False,
    ) -> None:
        """Take note that files are gone, whose texts were deleted before.

        is_gone: of a file that was kept meanwhile, whose text came back: it may be a new one.
        """

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(
                f"DELETE FROM chunks WHERE digest = ? AND key = ? AND state = {DELETED}", places
            )
            for place in places:
                tables.forget_missing(connection, place, is_gone, self.windows_of)
            connection.execute(
                "DELETE FROM fingerprints WHERE digest NOT IN (SELECT digest FROM chunks)"
            )

        self.database.write(work)
        self.database.scrub()

    # -- what requests used ---------------------------------------------------------------------

    def known(self, namespace: str, digest: str | None) -> list[str]:
        """Sorted keys of the chunks that there is a text of, with a cache or without one."""
        rows = self.database.read(
            lambda c: c.execute(
                "SELECT DISTINCT key FROM texts WHERE namespace = ? "
                "AND digest = coalesce(?, digest) ORDER BY key",
                [namespace, digest],
            ).fetchall()
        )
        return [key for (key,) in rows]

    def use(self, namespace: str, digest: str, keys: Sequence[str]) -> None:
        """Take note that chunks are in use: they are evicted later."""
        now = time.time()
        self.database.write(
            lambda c: c.executemany(
                "UPDATE chunks SET used_at = ? WHERE digest = ? AND key = ? AND namespace = ?",
                [(now, digest, key, namespace) for key in keys],
            ),
            patience_s=_PATIENCE_S,
        )

    def record(
        self, namespace: str, digest: str, used: Sequence[str], missed: Sequence[str]
    ) -> None:
        """Take note of what a request answered from, and of what it missed."""

        def work(connection: sqlite3.Connection) -> None:
            now = time.time()
            connection.executemany(
                "UPDATE chunks SET used_at = ? WHERE digest = ? AND key = ? AND namespace = ?",
                [(now, digest, key, namespace) for key in used],
            )
            tables.count(connection, namespace, digest, hits=len(used), misses=len(missed))

        self.database.write(work, patience_s=_PATIENCE_S)

    def quarantined(self, namespace: str, digest: str, key: str, name: str, n_bytes: int) -> None:
        """Take note that a damaged file was moved to the quarantine, as ``name``."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                f"UPDATE chunks SET state = {LOST}, bytes = 0 WHERE digest = ? AND key = ? "
                f"AND state != {DELETED}",
                [digest, key],
            )
            connection.execute(
                "INSERT OR REPLACE INTO quarantined VALUES(?, ?, ?)", [name, namespace, n_bytes]
            )
            tables.count(connection, namespace, digest, corrupt=1)

        self.database.write(work)

    def leave_quarantine(self, names: Iterable[str]) -> None:
        self.database.write(
            lambda c: c.executemany("DELETE FROM quarantined WHERE name = ?", [(n,) for n in names])
        )

    # -- texts ----------------------------------------------------------------------------------

    def text(self, namespace: str, key: str) -> str | None:

        def work(connection: sqlite3.Connection) -> str | None:
            found = connection.execute(
                "SELECT body FROM texts WHERE key = ? AND +namespace = ? ORDER BY id DESC",
                [key, namespace],
            ).fetchone()
            return tables.decode(found[0]) if found else None

        return self.database.read(work)

    def texts(self, namespace: str) -> Iterator[tuple[str, str, str]]:
        """(digest, key, text) of every chunk."""

        def work(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
            rows = connection.execute(
                "SELECT digest, key, body FROM texts WHERE namespace = ?", [namespace]
            )
            return [(digest, key, tables.decode(body)) for digest, key, body in rows]

        return iter(self.database.read(work))

    # -- what does not change ---------------------------------------------------------------------

    def agree(self, name: str, value: int) -> int:
        """The value of a setting: that of who was first."""

        def work(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT OR IGNORE INTO settings VALUES(?, ?)", [name, value])
            return int(tables.value(connection, name))

        known = self.database.read(lambda c: tables.value(c, name))
        return self.database.write(work) if known is None else int(known)

    def fingerprints(self, namespace: str | None = None) -> dict[str, dict[str, Any]]:
        """Fields by digest, of those with a chunk that is there."""

        def work(connection: sqlite3.Connection) -> dict[str, dict[str, Any]]:
            rows = connection.execute(
                "SELECT digest, fields FROM fingerprints "
                f"WHERE digest IN (SELECT digest FROM chunks WHERE state = {PRESENT} "
                "AND namespace = coalesce(?, namespace)) ORDER BY digest",
                [namespace],
            )
            try:
                return {digest: dict(json.loads(fields)) for digest, fields in rows}
            except (ValueError, TypeError, RecursionError) as error:
                raise tables.damaged("a fingerprint") from error

        return self.database.read(work)

    def totals(self, namespace: str | None) -> list[tuple[str, str, int, int]]:
        """(namespace, digest, chunks, bytes) of those that are there."""
        return self.database.read(
            lambda c: c.execute(
                "SELECT namespace, digest, count(*), sum(bytes) FROM chunks WHERE state = ? "
                "AND namespace = coalesce(?, namespace) GROUP BY namespace, digest",
                [PRESENT, namespace],
            ).fetchall()
        )

    def counts(self, namespace: str | None) -> dict[tuple[str, str], tuple[int, int, int, int]]:
        """(hits, misses, evictions, corrupt) by namespace and digest."""
        rows = self.database.read(
            lambda c: c.execute(
                "SELECT namespace, digest, hits, misses, evictions, corrupt FROM counts "
                "WHERE namespace = coalesce(?, namespace)",
                [namespace],
            ).fetchall()
        )
        return {(space, digest): tuple(of_one) for space, digest, *of_one in rows}


class IndexedChunks:
    """The chunks of a namespace and a fingerprint as a `ChunkIndex`, with a cache or without one.

    Methods raise StoreError as those of `Index` do.
    """

    def __init__(self, index: Index, namespace: str, digest: str) -> None:
        self._index, self._namespace, self._digest = index, namespace, digest

    @property
    def windows(self) -> Windows:
        return self._index.windows_of(self._namespace, self._digest)

    def places(self, hashes: Iterable[int]) -> Mapping[int, Sequence[Place]]:
        def work(connection: sqlite3.Connection) -> dict[int, list[Place]]:
            # The hash is keyed by both; the join makes sure of it. CROSS and "+": windows first.
            of_one = (
                "SELECT key, at FROM windows CROSS JOIN texts ON id = chunk "
                f"WHERE hash = ? AND +namespace = ? AND +digest = ? LIMIT {MAX_PLACES}"
            )
            found = {
                hashed: connection.execute(
                    of_one, [hashed, self._namespace, self._digest]
                ).fetchall()
                for hashed in hashes
            }
            return {hashed: places for hashed, places in found.items() if places}

        return self._index.database.read(work)

    def token_ids(self, keys: Iterable[str]) -> Mapping[str, Ids]:
        def work(connection: sqlite3.Connection) -> dict[str, Ids]:
            of_one = "SELECT ids FROM texts WHERE key = ? AND digest = ? AND +namespace = ?"
            found = {
                key: connection.execute(of_one, [key, self._digest, self._namespace]).fetchone()
                for key in keys
            }
            return {key: tables.ids_of(row[0]) for key, row in found.items() if row}

        return self._index.database.read(work)

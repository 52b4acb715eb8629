"""The index of a folder of chunk caches: bytes, recency, texts and counts, in SQLite.

The chunk files are the truth, and reading a cache does not ask the index. It knows what takes a
look at every file to find out: what all of them take, which was used last, and where texts begin.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from samkv_integrations.cache import tables
from samkv_integrations.cache.bare import LOOKUP_CHARS
from samkv_integrations.cache.base import MAX_ALIKE, MAX_STEPS, Beginnings
from samkv_integrations.cache.budget import Budget
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.database import Database
from samkv_integrations.cache.tables import DELETED, EVICTED, LOST, PRESENT, Entry
from samkv_integrations.cache.text_index import common_beginning

_PATIENCE_S = 1.0
"""For notes that a question leaves, and does not need."""


class Index:
    """What a folder of chunk caches holds; every method raises StoreError if it cannot be used.

    Args:
        folder: of the store.
        entries: all chunk files that are there, read when an index has to be made.
    """

    def __init__(self, folder: Path, entries: Callable[[], Iterable[Entry]]) -> None:
        def fill(connection: sqlite3.Connection) -> None:
            for entry in entries():
                tables.keep(connection, entry)

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
                tables.keep(connection, entry)

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
                tables.forget_texts(connection, clause, of_key, namespace)
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
                tables.forget_missing(connection, place, is_gone)
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
                "SELECT form, body FROM texts WHERE key = ? AND +namespace = ? ORDER BY id DESC",
                [key, namespace],
            ).fetchone()
            return tables.body(*found) if found else None

        return self.database.read(work)

    def texts(self, namespace: str) -> Iterator[tuple[str, str, str]]:
        """(digest, key, body) of every text."""

        def work(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
            rows = connection.execute(
                "SELECT digest, key, form, body FROM texts WHERE namespace = ?", [namespace]
            )
            return [(digest, key, tables.body(form, body)) for digest, key, form, body in rows]

        return iter(self.database.read(work))

    def add_text(self, namespace: str, digest: str, key: str, text: str) -> None:
        """Another text of a chunk: some tokenizers make the same tokens of different ones."""
        self.database.write(lambda c: tables.add_text(c, namespace, digest, key, text))

    def beginnings(self, namespace: str, digest: str, since: Hashable | None) -> Beginnings:
        """See `Store.beginnings`."""

        def work(connection: sqlite3.Connection) -> Beginnings:
            deletions = tables.deletions(connection, namespace)
            before: Any = since
            is_all = before is None or before[:2] != (digest, deletions)
            last, longest = (-1, 0) if is_all else before[2:]
            rows = connection.execute(
                "SELECT id, head, size FROM texts WHERE namespace = ? AND digest = ? AND id > ?",
                [namespace, digest, last],
            ).fetchall()
            last = max((row[0] for row in rows), default=last)
            longest = max((row[2] for row in rows), default=longest)
            if not is_all:
                longest = max(longest, before[3])
            return Beginnings(
                cursor=(digest, deletions, last, longest),
                heads=[tables.decode(row[1]) for row in rows if row[2] >= LOOKUP_CHARS],
                longest=longest,
                is_all=is_all,
            )

        return self.database.read(work)

    def texts_like(self, namespace: str, digest: str, bare: str) -> Iterator[tuple[str, list[str]]]:
        """See `Store.texts_like`."""
        probe, n_steps = tables.encode(bare), 0
        while len(probe) >= LOOKUP_CHARS and n_steps < MAX_STEPS:
            form = tables.encode(self._largest_form([namespace, digest, probe]))
            if not probe.startswith(form):
                probe, n_steps = common_beginning(probe, form), n_steps + 1
                continue
            if found := self._bodies([namespace, digest, form]):
                yield tables.decode(form), found
            probe, n_steps = form[:-1], 0

    def _largest_form(self, below: list[object]) -> str:
        """The last bare form up to ``below`` (namespace, digest, form); empty if there is none."""

        def work(connection: sqlite3.Connection) -> str:
            found = connection.execute(
                "SELECT form FROM texts WHERE namespace = ? AND digest = ? AND form <= ? "
                "ORDER BY form DESC LIMIT 1",
                below,
            ).fetchone()
            return tables.decode(found[0]) if found else ""

        return self.database.read(work)

    def _bodies(self, of_form: list[object]) -> list[str]:
        def work(connection: sqlite3.Connection) -> list[str]:
            rows = connection.execute(
                "SELECT DISTINCT form, body FROM texts "
                f"WHERE namespace = ? AND digest = ? AND form = ? LIMIT {MAX_ALIKE}",
                of_form,
            )
            return [normalise(tables.body(form, body)) for form, body in rows]

        return self.database.read(work)

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

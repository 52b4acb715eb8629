"""What the files of a store may take, and making room for the next one."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping

from samkv_integrations.cache import tables
from samkv_integrations.cache.database import Database
from samkv_integrations.cache.tables import Entry
from samkv_integrations.errors import InvalidOption, StoreError

WAITS_S = tuple(0.005 * 2**n for n in range(10))
"""Some 5 s in all, for files that are being written; each takes milliseconds."""

MOST = 2**63 - 1
"""What SQLite can count to."""


def check_budget(max_bytes: int | None, quota: Mapping[str, int]) -> None:
    """Raises InvalidOption if one is no number of bytes."""
    for name, value in (("max_bytes", max_bytes), *quota.items()):
        if value is not None and (type(value) is not int or not 1 <= value <= MOST):
            raise InvalidOption(
                f"{name}={value!r:.40}; a budget is a number of bytes, 1 to 2^63 - 1; "
                "None for no limit"
            )


class Budget:
    """The budget of a store, which holds for all processes; see `Index`, whose database it is in.

    Every method raises StoreError if the database cannot be used.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._released: set[str] = set()  # that the database could not be told

    def reserve(
        self,
        entry: Entry,
        temporary: str,
        evict: Callable[[str, str], bool],
        drop: Callable[[str], None],
    ) -> None:
        """Make room for a file, by evicting those used least recently, and count its bytes.

        Where the files that are being written take all the room there is, it waits for them.

        temporary: what the file is called while it is written.
        evict: deletes the file of (digest, key), unless it is being read; whether it is gone.
        drop: deletes a file of the quarantine.

        Raises StoreError if there is no room.
        """

        def work(connection: sqlite3.Connection) -> str:
            tables.release(connection, released)
            for limit, what in tables.limits(connection, entry.namespace):
                if entry.n_bytes > limit:
                    return f"a cache of {entry.n_bytes} bytes is larger than {what}, {limit} bytes"
            if (written := tables.written(connection, entry)) and not is_last_try:
                return written
            connection.execute(
                "INSERT INTO pending VALUES(?, ?, ?, ?, ?)",
                [temporary, entry.digest, entry.key, entry.namespace, entry.n_bytes],
            )
            problem = tables.make_room(connection, entry, evict, drop)
            if problem:  # what was evicted is gone all the same
                connection.execute("DELETE FROM pending WHERE temporary = ?", [temporary])
            return problem

        for wait_s in (*WAITS_S, 0.0):
            is_last_try = not wait_s
            released = list(self._released)
            problem = self.database.write(work)
            self._released.difference_update(released)
            if problem != tables.WRITTEN:
                break
            time.sleep(wait_s)
        if problem:
            raise StoreError(f"{problem}; next step: samkv store budget, or a larger max_bytes")

    def release(self, temporary: str) -> None:
        """Count the bytes of a file no more, which has not been written after all.

        If that fails, the next `reserve` does it.
        """
        self._released.add(temporary)
        self.database.write(lambda c: tables.release(c, [temporary]))
        self._released.discard(temporary)

    def pending(self) -> list[tuple[str, str, str]]:
        """(temporary, digest, key) of the files that are being written, or were by who died."""
        return self.database.read(
            lambda c: c.execute("SELECT temporary, digest, key FROM pending").fetchall()
        )

    def write(self, max_bytes: int | None, quota: Mapping[str, int | None]) -> None:
        """Write down what the caches of all, and of namespaces, may take; None for no limit."""

        def work(connection: sqlite3.Connection) -> None:
            tables.set_value(connection, "max_bytes", max_bytes)
            connection.executemany(
                "INSERT INTO spaces(namespace, quota) VALUES(?, ?) "
                "ON CONFLICT DO UPDATE SET quota = excluded.quota",
                quota.items(),
            )

        self.database.write(work)

    def read(self) -> tuple[int | None, dict[str, int]]:
        """``max_bytes`` and the quotas that were written down."""

        def work(connection: sqlite3.Connection) -> tuple[int | None, dict[str, int]]:
            quotas = connection.execute(
                "SELECT namespace, quota FROM spaces WHERE quota IS NOT NULL"
            ).fetchall()
            return tables.value(connection, "max_bytes"), dict(quotas)

        return self.database.read(work)

    def make_room(self, evict: Callable[[str, str], bool], drop: Callable[[str], None]) -> None:
        """Evict until the budget holds, after it was made smaller."""

        def work(connection: sqlite3.Connection) -> None:
            for (namespace,) in connection.execute("SELECT namespace FROM spaces").fetchall():
                nothing = Entry(
                    digest="",
                    key="",
                    namespace=namespace,
                    text="",
                    token_ids=(),
                    n_bytes=0,
                    fields={},
                    used_at=0,
                )
                tables.make_room(connection, nothing, evict, drop)

        self.database.write(work)

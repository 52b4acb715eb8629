"""The tables of the index, and what is done to them within one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samkv_integrations.cache.bare import LOOKUP_CHARS, bare_form
from samkv_integrations.cache.chunk import normalise

PRESENT, EVICTED, LOST, DELETED = range(4)
"""States of a chunk: its file is there; it went for want of room; it was not where it should be;
its text is gone, and its file is about to go."""

# `spaces` has what is true of a namespace, its bytes kept by triggers. A file that is being written
# is `pending`: its bytes count before it is begun.
SCHEMA = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE fingerprints(digest TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE spaces(
  namespace TEXT PRIMARY KEY, bytes INTEGER NOT NULL DEFAULT 0, quota INTEGER,
  deletions INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE chunks(
  digest TEXT, key TEXT, namespace TEXT NOT NULL, bytes INTEGER NOT NULL, state INTEGER NOT NULL,
  used_at REAL NOT NULL, PRIMARY KEY(digest, key)) WITHOUT ROWID;
CREATE INDEX chunks_used ON chunks(state, used_at);
CREATE INDEX chunks_of ON chunks(namespace, state, digest);
CREATE INDEX chunks_named ON chunks(key);
CREATE TABLE pending(
  temporary TEXT PRIMARY KEY, digest TEXT NOT NULL, key TEXT NOT NULL, namespace TEXT NOT NULL,
  bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE quarantined(
  name TEXT PRIMARY KEY, namespace TEXT NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE counts(
  namespace TEXT, digest TEXT, hits INTEGER NOT NULL DEFAULT 0, misses INTEGER NOT NULL DEFAULT 0,
  evictions INTEGER NOT NULL DEFAULT 0, corrupt INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY(namespace, digest)) WITHOUT ROWID;
CREATE TABLE texts(
  namespace TEXT, digest TEXT, form BLOB, key TEXT, body BLOB, id INTEGER NOT NULL UNIQUE,
  head BLOB NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY(namespace, digest, form, key)) WITHOUT ROWID;
CREATE INDEX texts_of ON texts(key, digest);
CREATE INDEX texts_new ON texts(namespace, digest, id, head, size);
""" + "".join(
    f"""
CREATE TRIGGER {table}_in AFTER INSERT ON {table} BEGIN
  INSERT INTO spaces(namespace, bytes) VALUES(NEW.namespace, NEW.bytes)
    ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes; END;
CREATE TRIGGER {table}_out AFTER DELETE ON {table} BEGIN
  UPDATE spaces SET bytes = bytes - OLD.bytes WHERE namespace = OLD.namespace; END;
CREATE TRIGGER {table}_new AFTER UPDATE OF bytes ON {table} BEGIN
  UPDATE spaces SET bytes = bytes + NEW.bytes - OLD.bytes WHERE namespace = NEW.namespace; END;
"""
    for table in ("chunks", "pending", "quarantined")
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A chunk file: what the index is told of it."""

    digest: str
    key: str
    namespace: str
    text: str
    n_bytes: int
    fields: dict[str, Any]
    used_at: float


def keep(connection: sqlite3.Connection, entry: Entry, *, state: int = PRESENT) -> None:
    """Take note of a chunk, in place of one of this key. state: of its file."""
    connection.execute(
        "INSERT OR IGNORE INTO fingerprints VALUES(?, ?)",
        [entry.digest, json.dumps(entry.fields, sort_keys=True)],
    )
    connection.execute(
        "INSERT INTO chunks VALUES(?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "bytes = excluded.bytes, state = excluded.state, used_at = excluded.used_at",
        [entry.digest, entry.key, entry.namespace, entry.n_bytes, state, entry.used_at],
    )
    known = connection.execute(
        "SELECT form, body FROM texts WHERE key = ? AND digest = ?", [entry.key, entry.digest]
    ).fetchall()
    if entry.text not in [body(*row) for row in known]:
        add_text(connection, entry.namespace, entry.digest, entry.key, entry.text)


def add_text(
    connection: sqlite3.Connection, namespace: str, digest: str, key: str, text: str
) -> None:
    """Make a text of a chunk known."""
    form, _ = bare_form(normalise(text))
    (new_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM texts").fetchone()
    connection.execute(
        "INSERT OR REPLACE INTO texts VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
        [namespace, digest, encode(form), key, None if text == form else encode(text), new_id,
         encode(form[:LOOKUP_CHARS]), len(form)],
    )  # fmt: skip


def same_texts(connection: sqlite3.Connection, namespace: str, keys: Sequence[str]) -> set[str]:
    """These keys, and those of all chunks that have a text of theirs."""
    found = set(keys)
    for key in keys:
        for form, text in connection.execute(
            "SELECT form, body FROM texts WHERE key = ? AND +namespace = ?", [key, namespace]
        ).fetchall():
            wanted = normalise(body(form, text))
            alike = connection.execute(
                "SELECT key, form, body FROM texts WHERE namespace = ? AND form = ? "
                "AND digest IN (SELECT digest FROM fingerprints)",
                [namespace, form],
            )
            found |= {k for k, *row in alike if normalise(body(*row)) == wanted}
    return found


def forget_texts(
    connection: sqlite3.Connection, clause: str, values: list[str | None], namespace: str
) -> None:
    """Delete texts, and say so to who remembers where texts begin."""
    if connection.execute(f"DELETE FROM texts {clause}", values).rowcount:
        connection.execute(
            "UPDATE spaces SET deletions = deletions + 1 WHERE namespace = ?", [namespace]
        )


# Not in the schema: a folder that shares nothing has none, and its index stays as it is.
_SHARED = """
CREATE TABLE IF NOT EXISTS shared(
  namespace TEXT, digest TEXT, key TEXT, PRIMARY KEY(namespace, digest, key)) WITHOUT ROWID"""


def mark_shared(
    connection: sqlite3.Connection, namespace: str, places: Iterable[tuple[str, str]]
) -> None:
    """Take note that chunks (digest, key) are in the remote tier."""
    connection.execute(_SHARED)
    connection.executemany(
        "INSERT OR IGNORE INTO shared VALUES(?, ?, ?)", [(namespace, *place) for place in places]
    )


def unmark_shared(
    connection: sqlite3.Connection, namespace: str, keys: Iterable[str] | None = None
) -> None:
    """Take note that chunks are in the remote tier no more; all of them for None."""
    connection.execute(_SHARED)
    if keys is None:
        connection.execute("DELETE FROM shared WHERE namespace = ?", [namespace])
        return
    connection.executemany(
        "DELETE FROM shared WHERE namespace = ? AND key = ?", [(namespace, key) for key in keys]
    )


def shared(connection: sqlite3.Connection, namespace: str) -> set[tuple[str, str]]:
    """(digest, key) of the chunks that were in the remote tier when this machine looked last."""
    name = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'shared'"
    if connection.execute(name).fetchone() is None:
        return set()
    rows = connection.execute("SELECT digest, key FROM shared WHERE namespace = ?", [namespace])
    return set(rows.fetchall())


def forget_missing(
    connection: sqlite3.Connection, place: tuple[str, str], is_gone: Callable[[str, str], bool]
) -> None:
    """Delete a chunk and its texts that is said to be there, if its file is not."""
    found = connection.execute(
        "SELECT namespace FROM chunks WHERE digest = ? AND key = ? AND state = ?",
        [*place, PRESENT],
    ).fetchone()
    if found and is_gone(*place):
        connection.execute("DELETE FROM chunks WHERE digest = ? AND key = ?", place)
        clause = "WHERE +namespace = ? AND digest = ? AND key = ?"
        forget_texts(connection, clause, [found[0], *place], found[0])


def deletions(connection: sqlite3.Connection, namespace: str) -> int:
    """How often texts of a namespace were deleted."""
    found = connection.execute(
        "SELECT deletions FROM spaces WHERE namespace = ?", [namespace]
    ).fetchone()
    return found[0] if found else 0


_OF_ALL = "the store's max_bytes"


def limits(connection: sqlite3.Connection, namespace: str) -> Iterator[tuple[int, str]]:
    """What the caches of a namespace, and of all, may take, and what the limit is called."""
    quota = connection.execute(
        "SELECT quota FROM spaces WHERE namespace = ?", [namespace]
    ).fetchone()
    if quota and quota[0] is not None:
        yield quota[0], f"the quota of namespace {namespace!r}"
    if (most := value(connection, "max_bytes")) is not None:
        yield most, _OF_ALL


def has_budget(connection: sqlite3.Connection) -> bool:
    """Whether there is a limit of any kind."""
    (quotas,) = connection.execute("SELECT count(quota) FROM spaces").fetchone()
    return bool(quotas) or value(connection, "max_bytes") is not None


def release(connection: sqlite3.Connection, temporary: Iterable[str]) -> None:
    """Count files no more that are not being written."""
    connection.executemany(
        "DELETE FROM pending WHERE temporary = ?", [(name,) for name in temporary]
    )


WRITTEN = "files that are being written take all the room"


def written(connection: sqlite3.Connection, entry: Entry) -> str:
    """`WRITTEN` if what is being written leaves no room for ``entry``, whatever is evicted."""
    for limit, what in limits(connection, entry.namespace):
        space = None if what == _OF_ALL else entry.namespace
        (pending,) = connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM pending WHERE namespace = coalesce(?, namespace)",
            [space],
        ).fetchone()
        if pending + entry.n_bytes > limit:
            return WRITTEN
    return ""


def make_room(
    connection: sqlite3.Connection,
    entry: Entry,
    evict: Callable[[str, str], bool],
    drop: Callable[[str], None],
) -> str:
    """Evict until the budgets hold that ``entry`` counts for; what is wrong, if they cannot."""
    for limit, what in list(limits(connection, entry.namespace)):
        space = None if what == _OF_ALL else entry.namespace
        if used(connection, space) <= limit:
            continue
        for (name,) in connection.execute(
            "SELECT name FROM quarantined WHERE namespace = coalesce(?, namespace)", [space]
        ).fetchall():
            drop(name)
            connection.execute("DELETE FROM quarantined WHERE name = ?", [name])
        _evict(connection, space, limit, evict)
        if (taken := used(connection, space)) > limit:
            return f"{what} is {limit} bytes, and {taken} are being read or written at this moment"
    return ""


def _evict(
    connection: sqlite3.Connection, space: str | None, limit: int, evict: Callable[[str, str], bool]
) -> None:
    """Evict chunks, the one used least recently first, until ``limit`` holds."""
    over = used(connection, space) - limit
    found = connection.execute(
        "SELECT digest, key, namespace, bytes FROM chunks WHERE state = ? "
        "AND namespace = coalesce(?, namespace) ORDER BY used_at",
        [PRESENT, space],
    )
    going = []
    for digest, key, namespace, n_bytes in found:
        if over <= 0:
            break
        if evict(digest, key):
            over -= n_bytes
            going.append((digest, key, namespace))
    for digest, key, namespace in going:
        connection.execute(
            "UPDATE chunks SET state = ?, bytes = 0 WHERE digest = ? AND key = ?",
            [EVICTED, digest, key],
        )
        count(connection, namespace, digest, evictions=1)


def used(connection: sqlite3.Connection, namespace: str | None) -> int:
    """Bytes that the chunk files of a namespace, or of all, take or are about to."""
    (taken,) = connection.execute(
        "SELECT coalesce(sum(bytes), 0) FROM spaces WHERE namespace = coalesce(?, namespace)",
        [namespace],
    ).fetchone()
    return int(taken)


def count(connection: sqlite3.Connection, namespace: str, digest: str, **more: int) -> None:
    """Add to the counts ``hits``, ``misses``, ``evictions`` or ``corrupt``."""
    connection.execute(
        "INSERT OR IGNORE INTO counts(namespace, digest) VALUES(?, ?)", [namespace, digest]
    )
    changes = ", ".join(f"{name} = {name} + {number:d}" for name, number in more.items())
    connection.execute(
        f"UPDATE counts SET {changes} WHERE namespace = ? AND digest = ?", [namespace, digest]
    )


def value(connection: sqlite3.Connection, name: str) -> Any:  # noqa: ANN401
    """A setting; None if it was never written down."""
    found = connection.execute("SELECT value FROM settings WHERE name = ?", [name]).fetchone()
    return found[0] if found else None


def set_value(connection: sqlite3.Connection, name: str, new: int | str | None) -> None:
    """Write a setting down."""
    connection.execute("INSERT OR REPLACE INTO settings VALUES(?, ?)", [name, new])


def encode(text: str) -> bytes:
    """UTF-8, also of half a character; sorts as the text does."""
    return text.encode(errors="surrogatepass")


def decode(data: bytes) -> str:
    """What `encode` was given. Raises sqlite3.DatabaseError if it is something else."""
    try:
        return data.decode(errors="surrogatepass")
    except (UnicodeDecodeError, AttributeError) as error:
        raise damaged("a text") from error


def damaged(what: str) -> sqlite3.DatabaseError:
    """What SQLite would raise, had it seen that a row is not as it was written."""
    error = sqlite3.DatabaseError(f"{what} is damaged")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def body(form: bytes, text: bytes | None) -> str:
    """The text of a row, which leaves it out if it is its own bare form."""
    return decode(form if text is None else text)

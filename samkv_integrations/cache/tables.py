"""The tables of the index, and what is done to them within one transaction."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.windows import Ids, Windows

PRESENT, EVICTED, LOST, DELETED = range(4)
"""States of a chunk: its file is there; it went for want of room; it was not where it should be;
its text is gone, and its file is about to go."""

# `spaces` has what is true of a namespace, its bytes kept by triggers. A file that is being written
# is `pending`: its bytes count before it is begun. `texts` has the text and the token ids of each
# chunk, `same` being a hash of the body, and `windows` says where hashes of token ids occur first.
SCHEMA = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE fingerprints(digest TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE spaces(
  namespace TEXT PRIMARY KEY, bytes INTEGER NOT NULL DEFAULT 0, quota INTEGER) WITHOUT ROWID;
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
  id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, digest TEXT NOT NULL, key TEXT NOT NULL,
  body BLOB NOT NULL, same BLOB NOT NULL, ids BLOB NOT NULL, UNIQUE(key, digest));
CREATE INDEX texts_of ON texts(namespace, digest, key);
CREATE INDEX texts_same ON texts(namespace, same);
CREATE TABLE windows(
  hash INTEGER, chunk INTEGER, at INTEGER NOT NULL, PRIMARY KEY(hash, chunk)) WITHOUT ROWID;
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
    token_ids: Sequence[int]
    n_bytes: int
    fields: dict[str, Any]
    used_at: float


WindowsOf = Callable[[str, str], Windows]
"""What hashes the token ids of the chunks of a namespace and a fingerprint."""


def keep(
    connection: sqlite3.Connection, entry: Entry, windows_of: WindowsOf, *, state: int = PRESENT
) -> None:
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
    ids = np.asarray(entry.token_ids, "<i4")
    (chunk,) = connection.execute(
        "INSERT INTO texts(namespace, digest, key, body, same, ids) VALUES(?, ?, ?, ?, ?, ?) "
        "ON CONFLICT(key, digest) DO UPDATE SET body = excluded.body, same = excluded.same "
        "RETURNING id",
        [entry.namespace, entry.digest, entry.key, encode(entry.text), same(entry.text),
         ids.tobytes()],
    ).fetchone()  # fmt: skip
    places = windows_of(entry.namespace, entry.digest).first_places(ids)
    connection.executemany(
        "INSERT OR IGNORE INTO windows VALUES(?, ?, ?)",
        [(hashed, chunk, at) for hashed, at in places.items()],
    )


def same(text: str) -> bytes:
    """Names a body: two chunks have the same one if these are the same."""
    return hashlib.blake2b(encode(normalise(text)), digest_size=16).digest()


def same_texts(connection: sqlite3.Connection, namespace: str, keys: Sequence[str]) -> set[str]:
    """These keys, and those of all chunks that have a text of theirs."""
    found = set(keys)
    for key in keys:
        for (wanted,) in connection.execute(
            "SELECT same FROM texts WHERE key = ? AND +namespace = ?", [key, namespace]
        ).fetchall():
            alike = connection.execute(
                "SELECT key FROM texts WHERE namespace = ? AND same = ? "
                "AND digest IN (SELECT digest FROM fingerprints)",
                [namespace, wanted],
            )
            found |= {of_one for (of_one,) in alike}
    return found


def forget_texts(
    connection: sqlite3.Connection, clause: str, values: list[str | None], windows_of: WindowsOf
) -> None:
    """Delete texts, and what they are found by."""
    for chunk, namespace, digest, data in connection.execute(
        f"SELECT id, namespace, digest, ids FROM texts {clause}", values
    ).fetchall():
        places = windows_of(namespace, digest).first_places(ids_of(data))
        connection.executemany(
            "DELETE FROM windows WHERE hash = ? AND chunk = ?",
            [(hashed, chunk) for hashed in places],
        )
        connection.execute("DELETE FROM texts WHERE id = ?", [chunk])


def ids_of(data: bytes) -> Ids:
    """Token ids as they are kept. Raises sqlite3.DatabaseError if it is something else."""
    try:
        return np.frombuffer(data, "<i4")
    except (ValueError, TypeError) as error:
        raise damaged("the token ids of a chunk") from error


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
    connection: sqlite3.Connection,
    place: tuple[str, str],
    is_gone: Callable[[str, str], bool],
    windows_of: WindowsOf,
) -> None:
    """Delete a chunk and its texts that is said to be there, if its file is not."""
    found = connection.execute(
        "SELECT namespace FROM chunks WHERE digest = ? AND key = ? AND state = ?",
        [*place, PRESENT],
    ).fetchone()
    if found and is_gone(*place):
        connection.execute("DELETE FROM chunks WHERE digest = ? AND key = ?", place)
        clause = "WHERE +namespace = ? AND digest = ? AND key = ?"
        forget_texts(connection, clause, [found[0], *place], windows_of)


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
    """UTF-8, also of half a character."""
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

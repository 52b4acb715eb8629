"""The SQLite database in a store's folder: opened by many processes, replaced if it is damaged."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from samkv_integrations.cache.files import TEMPORARY, locked
from samkv_integrations.errors import StoreError

_T = TypeVar("_T")
_PREFIX, _SUFFIX = "index-", ".sqlite"
_BUSY_S = 60.0
# All SQL here is ours and right, so an error in it is one of the tables that it meets.
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_ERROR,
)
# Connections that a fork has left in this process. Closing one would end locks of the parent's.
_OF_PARENTS: list[sqlite3.Connection] = []


class Database:
    """One database, by whatever number of threads and processes.

    It is made under a lock, complete and under a new random name each time, as SQLite's files must
    never meet those of another database. A process that finds its own replaced opens the new one.

    Args:
        folder: of the store; the database is ``index-<8 hex>.sqlite`` in it.
        schema: SQL that makes the tables. A database that another schema made is made anew.
        fill: fills the tables of a new database from what else is in the folder.
    """

    def __init__(
        self, folder: Path, schema: str, fill: Callable[[sqlite3.Connection], None]
    ) -> None:
        self._folder = folder
        self._version = zlib.crc32(schema.encode()) & 0x7FFFFFFF
        self._schema = f"{schema} PRAGMA user_version={self._version};"
        self._fill = fill
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._path: Path | None = None  # None for one in memory
        self._process = -1

    def read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """What ``work`` finds, all at one moment. Raises StoreError."""
        return self._run(work, "BEGIN")

    def write(self, work: Callable[[sqlite3.Connection], _T], *, patience_s: float = _BUSY_S) -> _T:
        """Do ``work``, all of it or nothing, while no other process writes. Raises StoreError.

        ``work`` is done again if the database turns out to be damaged.

        patience_s: how long to wait for another process that writes.
        """
        return self._run(work, "BEGIN IMMEDIATE", patience_s)

    def scrub(self) -> None:
        """Make sure that the files hold nothing of what was deleted.

        Best effort: readers may be in the way, and the next call has another try.
        """
        with self._lock, suppress(sqlite3.Error, StoreError):
            self._connected().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def clear_up(self) -> None:
        """Delete what is left of databases that were never completed, or were replaced.

        Raises OSError if the folder cannot be used.
        """
        with locked(self._folder / "index.lock"):
            newest = self._newest()
            for name in os.listdir(self._folder):
                if is_index(name) and not (newest and name.startswith(newest.name)):
                    (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _run(
        self, work: Callable[[sqlite3.Connection], _T], begin: str, patience_s: float = _BUSY_S
    ) -> _T:
        with self._lock:
            try:
                try:
                    return self._transact(work, begin, patience_s)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._discard()
                    return self._transact(work, begin, patience_s)
            except sqlite3.Error as error:
                raise self._cannot(error) from error
            except OSError as error:
                raise self._cannot(error) from error

    def _transact(
        self, work: Callable[[sqlite3.Connection], _T], begin: str, patience_s: float
    ) -> _T:
        connection = self._connected()
        connection.execute(f"PRAGMA busy_timeout={int(1000 * patience_s)}")
        connection.execute(begin)
        try:
            done = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite itself rolls back after some errors
                connection.execute("ROLLBACK")
            raise
        return done

    # -- which file ---------------------------------------------------------------------------

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._process != os.getpid():
            _OF_PARENTS.append(self._connection)
            self._connection = None
        if self._connection is not None and self._path is not None and not self._path.exists():
            self.close()
        if self._connection is None:
            self._connection, self._process = self._open(), os.getpid()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self._path = self._newest()
        if self._path is None and os.access(self._folder, os.W_OK):
            with locked(self._folder / "index.lock"):
                self._path = self._newest() or self._make()
        if self._path is None:  # nor can there be one: all is read from the files, each time
            connection = _connect(":memory:")
            self._set_up(connection)
            return connection
        connection = _connect(str(self._path))
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] != self._version:
                raise _otherwise_made()
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.OperationalError:  # a folder that can only be read
            connection.close()
            connection = _connect(f"file:{quote(str(self._path))}?immutable=1")
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    def _newest(self) -> Path | None:
        names = [n for n in os.listdir(self._folder) if is_index(n) and n.endswith(_SUFFIX)]
        return self._folder / max(names) if names else None

    def _make(self) -> Path:
        """A new database, which appears under its name when it is complete."""
        path = self._folder / f"{_PREFIX}{secrets.token_hex(4)}{_SUFFIX}"
        temporary = path.with_name(path.name + TEMPORARY)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            connection = _connect(str(temporary))
            try:
                self._set_up(connection)
            finally:
                connection.close()
            temporary.rename(path)
        except BaseException:
            for file in self._folder.glob(f"{temporary.name}*"):
                file.unlink(missing_ok=True)
            raise
        return path

    def _set_up(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous=OFF")  # a power cut leaves a damaged one: made anew
        connection.executescript(f"BEGIN; {self._schema}")
        self._fill(connection)
        connection.execute("COMMIT")

    def _discard(self) -> None:
        """Delete the damaged database, unless another process has replaced it already."""
        self.close()
        with locked(self._folder / "index.lock"):
            if self._path is not None:
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    def _cannot(self, error: Exception) -> StoreError:
        return StoreError(
            f"cannot use the index of {self._folder}: {error}; next step: make room or allow "
            "access there, or use a store in another folder"
        )


def is_index(name: str) -> bool:
    """Whether a file of this name is a database, or a part of one."""
    return name.startswith(_PREFIX)


def _connect(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        name, timeout=_BUSY_S, isolation_level=None, check_same_thread=False,
        uri=name.startswith("file:"),
    )  # fmt: skip
    connection.execute("PRAGMA secure_delete=ON")
    return connection


def _otherwise_made() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("made by another release")
    error.sqlite_errorcode = sqlite3.SQLITE_SCHEMA
    return error


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_READONLY_DBMOVED)

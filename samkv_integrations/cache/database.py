"""The SQLite database in a store's folder: opened by many processes, replaced if it is damaged."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from samkv_integrations.cache.files import TEMPORARY, locked
from samkv_integrations.errors import StoreError

_T = TypeVar("_T")
_PREFIX, _SUFFIX = "index-", ".sqlite"
_BUSY_S = 60.0
_BRIEF_S = 1.0
"""How long to wait for what can be done later, or when somebody has not let go for long."""
# All SQL here is ours and right, so an error in it is one of the tables that it meets.
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_ERROR,
)
_FORK_S = 5.0
"""How long a fork waits for threads that are using a database."""


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
        self._is_makeshift = False  # cannot be written, nor sees what others write
        self._gave_up_at = -_BUSY_S
        self._is_held = False  # for a fork
        _watch_forks()
        _ALL[id(self)] = self

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
            connection = self._connected()
            connection.execute(f"PRAGMA busy_timeout={int(1000 * _BRIEF_S)}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def clear_up(self) -> None:
        """Delete what is left of databases that were never completed, or were replaced.

        Raises OSError if the folder cannot be used.
        """
        with locked(self._folder / "index.lock", self._patience(_BUSY_S)):
            newest = self._newest()
            for name in os.listdir(self._folder):
                if is_index(name) and not (newest and name.startswith(newest.name)):
                    (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    # -- forks ----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close the file: SQLite takes the locks that it knows of for its own, also in a child.

        There they are not, so that others would take files away that the child is writing to. Until
        `after_fork` the database is this thread's; one that another thread goes on using is not.
        """
        self._is_held = self._lock.acquire(timeout=_FORK_S)
        if self._is_held and self._path is not None:
            self.close()

    def after_fork(self, *, is_child: bool) -> None:
        """Let threads use the database again."""
        if self._is_held:
            self._is_held = False
            self._lock.release()
        elif is_child:  # the thread that has it is not here
            self._lock = threading.RLock()
            if self._connection is not None:
                _OF_PARENTS.append(self._connection)
            self._connection = None

    # -- transactions ---------------------------------------------------------------------------

    def _patience(self, patience_s: float) -> float:
        """How long to wait: not the same time again and again for who does not let go."""
        is_again = time.monotonic() < self._gave_up_at + _BUSY_S
        return min(patience_s, _BRIEF_S) if is_again else patience_s

    def _run(
        self, work: Callable[[sqlite3.Connection], _T], begin: str, patience_s: float = _BUSY_S
    ) -> _T:
        with self._lock:
            try:
                try:
                    return self._transact(work, begin, patience_s)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error) or self._is_makeshift:
                        raise
                    self._discard()
                    return self._transact(work, begin, patience_s)
            except (sqlite3.Error, OSError) as error:
                if not _is_busy(error):
                    self.close()  # what was in the way may be gone when it is opened again
                elif patience_s >= _BUSY_S:
                    self._gave_up_at = time.monotonic()
                raise self._cannot(error) from error

    def _transact(
        self, work: Callable[[sqlite3.Connection], _T], begin: str, patience_s: float
    ) -> _T:
        connection = self._connected()
        connection.execute(f"PRAGMA busy_timeout={int(1000 * self._patience(patience_s))}")
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
        is_gone = self._path is not None and not self._path.exists()
        if self._connection is not None and (is_gone or self._is_makeshift):
            self.close()
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self._path, self._is_makeshift = self._newest(), False
        if self._path is None and os.access(self._folder, os.W_OK):
            with locked(self._folder / "index.lock", self._patience(_BUSY_S)):
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
        except sqlite3.OperationalError:  # it can only be read, for good or at this moment
            connection.close()
            connection = _connect(f"file:{quote(str(self._path))}?immutable=1")
            self._is_makeshift = True
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
        with locked(self._folder / "index.lock", self._patience(_BUSY_S)):
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
    if code is None:  # a string that is no text
        return isinstance(error, sqlite3.OperationalError)
    return bool(code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_READONLY_DBMOVED)


def _is_busy(error: Exception) -> bool:
    """Whether others had the database, or were making it, all the time that was waited."""
    return (
        isinstance(error, TimeoutError)
        or getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
    )


# All of this process, as a fork is of all of it.
_ALL: weakref.WeakValueDictionary[int, Database] = weakref.WeakValueDictionary()
_FORKING = threading.Lock()
# Connections of threads that a fork left behind. Closing one would end locks of the parent's.
_OF_PARENTS: list[sqlite3.Connection] = []


def _before_fork() -> None:
    _FORKING.acquire()
    for reference in _ALL.valuerefs():  # a list, whatever other threads do
        if (database := reference()) is not None:
            database.before_fork()


def _after_fork(*, is_child: bool) -> None:
    for reference in _ALL.valuerefs():
        if (database := reference()) is not None:
            database.after_fork(is_child=is_child)
    _FORKING.release()


@cache
def _watch_forks() -> None:
    """Once a process, and not at import."""
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=partial(_after_fork, is_child=False),
        after_in_child=partial(_after_fork, is_child=True),
    )

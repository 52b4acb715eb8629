"""An SQLite database that many processes share, and that is rebuilt where it is lost or damaged."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from samkv_integrations.errors import SamkvError, StoreError

BUSY_S = 20.0
"""Seconds to wait for another process that holds the lock."""

BRIEF_S = 1.0
"""Seconds to wait for a write that a question can do without."""

# Errors of using damaged values, or of messages of SQLite that quote them: it has no checksums.
_BAD_VALUES = (ValueError, TypeError, AttributeError, RecursionError)
# Our SQL is right, so an error in it means that the tables are not.
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_ERROR,
)  # fmt: skip


class Database:
    """A database in a folder; a subclass fills a new one. Safe to use from many threads.

    Every method raises StoreError if the database cannot be used. A missing database is built. A
    damaged one is deleted, the call fails, and the next call builds it.

    It uses SQLite's rollback journal, not the write-ahead log: a forked process may open the file
    anew, a read-only folder can be read, and no log keeps deleted rows.

    folder: None for a database in memory. schema: SQL that makes the tables. Its checksum is part
    of the file's name, so another release does not see a file with other tables.
    """

    def __init__(self, folder: Path | None, schema: str) -> None:
        self._folder, self._schema = folder, schema
        self._prefix = f"index-{zlib.crc32(schema.encode()):08x}"
        self._lock, self._process = threading.RLock(), os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._of_parent: sqlite3.Connection | None = None
        self._path: Path | None = None  # None for one in memory

    def fill(self, connection: sqlite3.Connection) -> None:
        """Write the rows of a new database, whose tables are empty."""
        raise NotImplementedError

    @contextmanager
    def transaction(
        self, *, writes: bool = False, patience_s: float = BUSY_S
    ) -> Iterator[sqlite3.Connection]:
        """A block that sees one state of the database. A block within a block is a part of it.

        writes: either all changes of the block are kept or none; no other process writes meanwhile.
        patience_s: how long to wait for another process.
        """
        if self._process != os.getpid():  # forked: the connection is the parent's
            self._lock, self._process = threading.RLock(), os.getpid()
            if self._path is not None:  # kept open: closing it would release this process's locks
                self._of_parent, self._connection = self._connection, None
        with self._lock:
            if self._connection is not None and self._connection.in_transaction:
                yield self._connection
                return
            try:
                connection = self._open(patience_s)
                connection.execute(f"PRAGMA busy_timeout={int(1000 * patience_s)}")
                with connection:  # commits, or rolls back
                    connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                    yield connection
            except (UnicodeEncodeError, SamkvError):  # of the caller; no row is damaged
                raise
            except (sqlite3.Error, OSError, *_BAD_VALUES) as error:
                where = f"the index of {self._folder or 'the store'}"
                if self._path is not None and _is_damage(error):
                    self._discard()
                    raise StoreError(
                        f"{where} was damaged and is made anew ({error}); next step: try again"
                    ) from error
                remedy = "make room or allow access there, or use a store in another folder"
                if isinstance(error, FileNotFoundError):  # the folder was deleted
                    remedy = "open the store anew, in a new engine or process"
                raise StoreError(f"cannot use {where}: {error}; next step: {remedy}") from error

    def rows(self, sql: str, *values: object) -> list[Any]:
        """The rows of one statement."""
        with self.transaction() as connection:
            return connection.execute(sql, values).fetchall()

    def clear_up(self) -> None:
        """Check the database, and delete those that other releases or killed processes left."""
        if self._folder is None:
            return
        with suppress(StoreError):  # a damaged one has been deleted
            if self.rows("PRAGMA quick_check") != [("ok",)]:
                self._discard()
        with self._file_lock(self._folder):
            used = self._existing(self._folder)
            for file in self._folder.glob("index-*"):
                if used is None or not file.name.startswith(used.name):
                    file.unlink(missing_ok=True)

    def vacuum(self) -> None:
        """Rewrite the file, whose pages may still hold deleted bytes. Best effort."""
        with self._lock, suppress(StoreError, sqlite3.Error):  # others may be using it
            with self.transaction() as connection:
                pass
            connection.execute("VACUUM")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    # -- the file -------------------------------------------------------------------------------

    def _open(self, patience_s: float) -> sqlite3.Connection:
        if self._path is not None and not self._path.exists():  # another process has replaced it
            self.close()
        if self._connection is None:
            if self._folder is not None:
                self._path = self._existing(self._folder) or self._new_file(self._folder)
            self._connection = _connect(str(self._path or ":memory:"), patience_s)
            if self._path is None:
                try:
                    self._create(self._connection)
                except BaseException:
                    self.close()
                    raise
        return self._connection

    def _new_file(self, folder: Path) -> Path:
        if not os.access(folder, os.W_OK):
            raise StoreError(
                f"{folder} is read-only and has no index; next step: open the store once where it "
                "can be written"
            )
        with self._file_lock(folder):
            return self._existing(folder) or self._make(folder)

    def _existing(self, folder: Path) -> Path | None:
        """The file of this schema; the last by name if there are several, None if there is none."""
        names = [name for name in os.listdir(folder) if name.startswith(self._prefix)]
        return max((folder / name for name in names if name.endswith(".sqlite")), default=None)

    def _make(self, folder: Path) -> Path:
        """A new file, which gets its name when it is complete.

        The name is random, because SQLite's journal must never meet another database.
        """
        path = folder / f"{self._prefix}-{secrets.token_hex(4)}.sqlite"
        temporary = path.with_suffix(".tmp")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with closing(_connect(str(temporary), BUSY_S)) as connection:
                self._create(connection)
            temporary.rename(path)
        finally:
            for file in folder.glob(f"{temporary.name}*"):
                file.unlink(missing_ok=True)
        return path

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.executescript(f"BEGIN; {self._schema}")
        self.fill(connection)
        connection.execute("COMMIT")

    def _discard(self) -> None:
        self.close()
        if self._path is not None:
            with suppress(OSError):  # a read-only folder keeps it
                self._path.unlink(missing_ok=True)

    @staticmethod
    def _file_lock(folder: Path) -> FileLock:
        return FileLock(folder / "index.lock", timeout=BUSY_S, mode=0o600)


def _connect(name: str, patience_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        name, timeout=patience_s, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute("PRAGMA synchronous=OFF")  # what a power cut damages is rebuilt
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a damaged value, see `_BAD_VALUES`
        return isinstance(error, (sqlite3.OperationalError, *_BAD_VALUES))
    return bool(code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_READONLY_DBMOVED)

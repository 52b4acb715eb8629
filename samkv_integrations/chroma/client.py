"""Collections of a Chroma database, in a folder or on a server."""

from __future__ import annotations

import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from samkv_integrations.errors import InvalidOption, MissingExtra, SamkvError, UnknownOption

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from chromadb.config import Settings

KEY_FIELD = "samkv_key"
"""The metadata field of a record that holds the key of its chunk cache."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,510}[a-zA-Z0-9]")
"""Names that Chroma allows. They are checked here because Chroma's own error quotes a schema."""

_NO_ACCESS = (
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip

_log = logging.getLogger(__name__)

ASKING_S = 120
"""Most seconds of the process of `Database.check`, which loads all vectors of the collections."""

_ASK = """
import sys
from chromadb import PersistentClient
from chromadb.config import Settings

client = PersistentClient(sys.argv[1], settings=Settings(anonymized_telemetry=False))
for name in sys.argv[2:]:
    print(name, flush=True)
    collection = client.get_collection(name, embedding_function=None)
    one = collection.get(limit=1, include=["embeddings"])["embeddings"]
    if len(one):
        collection.query(query_embeddings=one, n_results=10)
"""


def open_collection(path: str | os.PathLike[str], name: str, create: bool) -> Collection:
    """The collection called ``name`` of the Chroma database in folder ``path``.

    Chroma sends no telemetry. It gets no embedding function, because it always gets embeddings.
    Chroma raises if the process has opened the folder with other settings, such as those of a
    ``chromadb.PersistentClient`` of its own.

    create: whether to make the folder and the collection if they are missing.

    Raises:
        UnknownOption: there is no such collection; lists those that exist.
        InvalidOption: there is no database, it cannot be opened, or Chroma refuses the name.
    """
    return Database(Path(path)).collection(name, create=create)


def connect_collection(
    host: str,
    port: int,
    name: str,
    create: bool,
    *,
    ssl: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Collection:
    """The collection called ``name`` of a Chroma server, with the settings of `open_collection`.

    Several processes may share a server (``chroma run``), but not a database folder. The chunk
    caches are in a folder that this process can reach, not on the server.

    Raises UnknownOption as `open_collection` does, InvalidOption if the server does not answer.
    """
    return _collection(client_of_server(host, port, ssl=ssl, headers=headers), name, create)


class Database:
    """The collections of a Chroma database. Thread-safe. Nothing is opened before the first use.

    All calls share one client of a server, because chromadb never closes a client's connection.

    Args:
        folder: where the database is, unless it is on a server.
        server: ``http://HOST:PORT`` or ``https://HOST:PORT``; None for the folder.

    Raises InvalidOption if ``server`` has another form.
    """

    def __init__(self, folder: Path, server: str | None = None) -> None:
        self._folder, self._server = folder, server
        self._address = None if server is None else _address(server)

    def __str__(self) -> str:
        return self._server or str(self._folder)

    def collection(self, name: str, *, create: bool = False) -> Collection:
        """The collection called ``name``; raises as `open_collection` does."""
        return _collection(self._client(create), name, create)

    def names(self) -> list[str]:
        """The sorted names of all collections."""
        client = self._client(create=False)
        with chroma_errors("Chroma cannot list its collections"):
            return sorted(collection.name for collection in client.list_collections())

    def describe(self, collection: Collection, fields: Mapping[str, str]) -> Collection:
        """Put these fields into the metadata of a collection; returns it.

        A collection without records is made anew, so that it takes vectors of any dimension.
        """
        client, name = self._client(create=False), collection.name
        with chroma_errors(f"collection {name!r} cannot be described"):
            if not collection.count():
                metadata = {**(collection.metadata or {}), **fields}
                client.delete_collection(name)
                return client.create_collection(name, metadata=metadata, embedding_function=None)
            known = dict(collection.metadata or {})
            known.pop("hnsw:space", None)  # Chroma takes it at creation alone
            collection.modify(metadata={**known, **fields})
            return collection

    def check(self, names: Sequence[str]) -> None:
        """Query each of these collections once, in a process of its own.

        A process that reads damaged files of vectors crashes. Collections without such files are
        skipped: Chroma writes the files from 1000 records on, and a server has its own.

        Raises InvalidOption if a query fails.
        """
        if not names or self._server or not any(self._folder.glob("*/")):
            return
        command = [sys.executable, "-P", "-c", _ASK, str(self._folder), *names]
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                command, env=os.environ | paths, capture_output=True, timeout=ASKING_S, check=False
            )
        except subprocess.TimeoutExpired:
            _log.warning("the check of %s did not end within %s s", self._folder, ASKING_S)
            return
        if done.returncode:
            why = _last_line(done.stderr)
            if done.returncode < 0:
                why = signal.Signals(-done.returncode).name
            raise InvalidOption(
                f"collection {_last_line(done.stdout)!r} in {self._folder} cannot be queried; the "
                f"process that tried ended with: {why}; restore that folder from a copy, or delete "
                "it and ingest its documents again (their chunk caches are kept)"
            )

    @cached_property
    def _of_server(self) -> ClientAPI:
        assert self._address is not None
        host, port, ssl = self._address
        return client_of_server(host, port, ssl=ssl)

    def _client(self, create: bool) -> ClientAPI:
        if self._address is not None:
            return self._of_server
        if not create and not os.path.isfile(self._folder / "chroma.sqlite3"):
            raise InvalidOption(
                f"{self._folder} holds no Chroma database; ingest documents into it first"
            )
        settings = _settings()
        from chromadb import PersistentClient

        with chroma_errors(f"Chroma cannot open {self._folder}"):
            return PersistentClient(self._folder, settings=settings)


def _last_line(said: bytes) -> str:
    return said.decode(errors="replace").strip().rpartition("\n")[2]


def client_of_server(
    host: str, port: int, *, ssl: bool = False, headers: Mapping[str, str] | None = None
) -> ClientAPI:
    """A client of a Chroma server. Raises InvalidOption if it does not answer."""
    settings = _settings()
    from chromadb import HttpClient

    with chroma_errors(f"Chroma at {host}:{port} cannot be reached"):
        return HttpClient(host, port, ssl=ssl, headers=dict(headers or {}), settings=settings)


def _settings() -> Settings:
    """Chroma's settings, without telemetry. Raises MissingExtra if Chroma is not installed."""
    try:
        import chromadb.config
    except ImportError as error:
        raise MissingExtra.of("chromadb", "chroma") from error
    return chromadb.config.Settings(anonymized_telemetry=False)


def _collection(client: ClientAPI, name: str, create: bool) -> Collection:
    from chromadb.errors import NotFoundError

    check_name(name)
    with chroma_errors(f"Chroma cannot open collection {name!r}"):
        if create:
            return client.get_or_create_collection(name, embedding_function=None)
        try:
            return client.get_collection(name, embedding_function=None)
        except NotFoundError as error:
            known = [collection.name for collection in client.list_collections()]
            raise UnknownOption.among("collection", name, known or ["none"]) from error


def _address(server: str) -> tuple[str, int, bool]:
    """Host, port, and whether the server speaks TLS."""
    with suppress(ValueError):  # the port may not be a number
        parts = urlsplit(server)
        has_more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        if parts.scheme in ("http", "https") and parts.hostname and parts.port and not has_more:
            return parts.hostname, parts.port, parts.scheme == "https"
    raise InvalidOption(
        f"Chroma server {server!r}; give http://HOST:PORT, https://HOST:PORT, or a folder that "
        "exists"
    )


def check_name(name: str) -> None:
    """Raises InvalidOption if Chroma does not allow ``name`` for a collection."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidOption(
            f"collection name {name!r}; it must have 3 to 512 letters (a to z), digits, '.', '_' "
            "and '-', and begin and end with a letter or a digit"
        )


@contextmanager
def chroma_errors(what: str) -> Iterator[None]:
    """Inside this block, errors of Chroma and of its connection become InvalidOption.

    So do panics of its Rust code, which are not subclasses of ``Exception``.
    """
    from chromadb.errors import ChromaError
    from httpx import TransportError

    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # no module exports the class
        of_chroma = (ChromaError, TransportError, ValueError, TypeError)
        if isinstance(error, SamkvError) or not (is_panic or isinstance(error, of_chroma)):
            raise
        of_sqlite = re.search(r"\(code: (\d+)\)", str(error))
        is_refused = bool(of_sqlite and int(of_sqlite[1]) & 0xFF in _NO_ACCESS)
        remedy = "; make room or allow access, because Chroma writes even for a query" * is_refused
        raise InvalidOption(f"{what}: {error}{remedy}") from error

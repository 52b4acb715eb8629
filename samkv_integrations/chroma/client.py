"""Collections of a Chroma database, in a folder or on a server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from samkv_integrations.errors import (
    InvalidOption,
    MissingExtra,
    UnknownOption,
)

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,510}[a-zA-Z0-9]")
"""What Chroma allows; its own message says it in the words of a schema."""

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection


def open_collection(path: str | os.PathLike[str], name: str, create: bool) -> Collection:
    """The collection called ``name`` of the Chroma database in folder ``path``.

    Chroma sends no telemetry and gets no embedding function: embeddings are always given to it.
    One process must not open a folder in another way too, with ``chromadb.PersistentClient`` and
    other settings: Chroma refuses that.

    create: whether to make what is missing of the folder and the collection.

    Raises:
        UnknownOption: there is no such collection; lists those that exist.
        InvalidOption: there is no database, it cannot be opened, or Chroma refuses the name.
    """
    return collection_of(client_of_folder(Path(path), create=create), name, create)


def connect_collection(
    host: str,
    port: int,
    name: str,
    create: bool,
    *,
    ssl: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Collection:
    """The collection called ``name`` of a Chroma server, as `open_collection` gives one.

    Several processes may share a server (``chroma run``), but not a database folder. The folder of
    chunk caches must be one that this process can reach: the server knows nothing of it.

    Raises:
        UnknownOption: there is no such collection; lists those that exist.
        InvalidOption: the server does not answer, or Chroma refuses the name.
    """
    client = client_of_server(host, port, ssl=ssl, headers=headers)
    return collection_of(client, name, create)


def collection_names(path: str | os.PathLike[str]) -> list[str]:
    """Sorted names of the collections in the Chroma database in folder ``path``.

    Raises InvalidOption as `open_collection` does.
    """
    return names_of(client_of_folder(Path(path), create=False))


def client_of_server(
    host: str, port: int, *, ssl: bool = False, headers: Mapping[str, str] | None = None
) -> ClientAPI:
    """A client of a Chroma server. Raises InvalidOption if it does not answer."""
    try:
        from chromadb import HttpClient
        from chromadb.config import Settings
    except ImportError as error:
        raise MissingExtra.of("chromadb", "chroma") from error
    with chroma_errors(f"Chroma at {host}:{port} cannot be reached"):
        return HttpClient(
            host=host,
            port=port,
            ssl=ssl,
            headers=dict(headers or {}),
            settings=Settings(anonymized_telemetry=False),
        )


def client_of_folder(folder: Path, *, create: bool) -> ClientAPI:
    """A client of the database in a folder. Raises InvalidOption as `open_collection` does."""
    try:
        from chromadb import PersistentClient
        from chromadb.config import Settings
    except ImportError as error:
        raise MissingExtra.of("chromadb", "chroma") from error
    try:
        is_there = (folder / "chroma.sqlite3").is_file()
    except OSError as error:
        raise InvalidOption(
            f"{folder} cannot be looked into: {error.strerror}; allow access to it, or give the "
            "folder of another database"
        ) from error
    if not create and not is_there:
        raise InvalidOption(f"{folder} holds no Chroma database; ingest documents into it first")
    with chroma_errors(f"Chroma cannot open {folder}"):
        return PersistentClient(folder, settings=Settings(anonymized_telemetry=False))


def names_of(client: ClientAPI) -> list[str]:
    """Sorted names of all collections. Raises InvalidOption if Chroma cannot tell."""
    with chroma_errors("Chroma cannot list its collections"):
        return sorted(collection.name for collection in client.list_collections())


def collection_of(client: ClientAPI, name: str, create: bool) -> Collection:
    """A collection of a client's database. Raises as `open_collection` does."""
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


def check_name(name: str) -> None:
    """Raises InvalidOption if Chroma could have no collection of this name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidOption(
            f"collection name {name!r}; give 3 to 512 letters (a to z), digits, '.', '_' and '-', "
            "that begin and end with a letter or a digit"
        )


@contextmanager
def chroma_errors(what: str) -> Iterator[None]:
    """Chroma's complaints about its arguments, and about a server that is gone, as ours."""
    from chromadb.errors import ChromaError
    from httpx import TransportError

    try:
        yield
    except (ChromaError, TransportError, ValueError, TypeError) as error:
        raise InvalidOption(f"{what}: {error}") from error

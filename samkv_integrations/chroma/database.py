"""A Chroma database by where it is: in a folder, or on a server, which is given by its address."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from samkv_integrations.chroma.client import (
    client_of_folder,
    client_of_server,
    collection_of,
    names_of,
    open_collection,
)
from samkv_integrations.errors import InvalidOption

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection


class Database:
    """The collections of a Chroma database. For many threads; nothing is opened before its use.

    A server has one client for as long as this lives: chromadb never lets go of one, nor of its
    connections.

    Args:
        folder: where the database is, if it is not on a server.
        server: ``http://HOST:PORT`` or ``https://HOST:PORT``; None for the folder.

    Raises InvalidOption if ``server`` is no such address.
    """

    def __init__(self, folder: Path, server: str | None = None) -> None:
        self._folder = folder
        self._address = None if server is None else _address(server)
        self._server = server
        self._client: ClientAPI | None = None
        self._opening = threading.Lock()

    def __str__(self) -> str:
        return self._server or str(self._folder)

    def collection(self, name: str, *, create: bool = False) -> Collection:
        """The collection called ``name``.

        create: whether to make what is missing of it.

        Raises:
            UnknownOption: there is no such collection; lists those that exist.
            InvalidOption: the database cannot be opened or reached, or Chroma refuses the name.
        """
        if self._address is None:
            return open_collection(self._folder, name, create)
        return collection_of(self._connected(*self._address), name, create)

    def names(self) -> list[str]:
        """Sorted names of its collections. Raises InvalidOption as `collection` does."""
        if self._address is None:
            return names_of(client_of_folder(self._folder, create=False))
        return names_of(self._connected(*self._address))

    def _connected(self, host: str, port: int, ssl: bool) -> ClientAPI:
        with self._opening:
            if self._client is None:
                self._client = client_of_server(host, port, ssl=ssl)
            return self._client


def _address(server: str) -> tuple[str, int, bool]:
    """Host, port, and whether it speaks TLS."""
    wrong = InvalidOption(f"Chroma server {server!r}; give http://HOST:PORT, or https://HOST:PORT")
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not host or port is None:
        raise wrong
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise wrong
    return host, port, parts.scheme == "https"

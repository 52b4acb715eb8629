"""API keys, and the engines and collections that each key may use."""

from __future__ import annotations

import hashlib
import hmac
import shlex
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.embedding import Embeddings
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption, StoreError, UnknownOption
from samkv_integrations.options import EngineOptions
from samkv_integrations.serving.listeners import Listener
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.store.disk import ChunkStore

LEAST_LENGTH = 16
"""Fewest characters of a key; shorter ones could be guessed."""

_FORM = "give each line as KEY, KEY NAMESPACE, or KEY NAMESPACE COLLECTION..."


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """The owner of an API key: what requests with the key may use.

    namespace: that of its chunk caches. collections: the collections that it may ask. owner:
    identifies the key for the scheduler.
    """

    namespace: str = ""
    collections: tuple[str, ...] = ()
    owner: str = field(default="", compare=False)


class ApiKeys:
    """The keys of a server, as SHA-256 digests. Without keys every request is answered.

    Args:
        text: one key a line, see `_FORM`, quoted as in a shell; ``#`` begins a comment.
        everybody: the tenant of requests without keys, and of keys that name no namespace.

    Raises InvalidOption for a line in another form, a short key, or a key that occurs twice. No
    message holds a key.
    """

    def __init__(self, text: str, everybody: Tenant) -> None:
        self._everybody = everybody
        self._tenants: dict[bytes, Tenant] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            where = f"API keys, line {number}"
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise InvalidOption(f"{where}: {error}; {_FORM}") from error
            if not words:
                continue
            key, *rest = words
            if len(key) < LEAST_LENGTH or not (key.isascii() and key.isprintable()):
                raise InvalidOption(
                    f"{where}: a key must have at least {LEAST_LENGTH} characters, all of them "
                    f"visible ASCII, and this key has {len(key)}; {_FORM}"
                )
            digest = _digest(key)
            if digest in self._tenants:
                raise InvalidOption(f"{where}: the key occurs twice; keep one")
            own = Tenant(namespace=rest[0], collections=tuple(rest[1:])) if rest else everybody
            self._tenants[digest] = replace(own, owner=digest.hex())

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> Iterable[Tenant]:
        """All tenants that the server answers."""
        return set(self._tenants.values()) or {self._everybody}

    def tenant_of(self, authorization: str | None) -> Tenant | None:
        """The tenant of a request with this header; None without a known key.

        Compares with every digest, in constant time.
        """
        if not self._tenants:
            return self._everybody
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Tenancy:
    """The engines, one for each namespace, and their collections. Engines share the model.

    Args:
        scheduler: runs the model, for all engines.
        folder: holds the chunk caches under ``kv``, as ``samkv ingest --dir`` leaves them.
        kv_dir: the folder of the chunk caches, if it is another one.
        remote: the remote tier, where machines share chunk caches; None for no remote tier.
        database: the database of the collections; None for the one under ``chroma`` in ``folder``.
        embeddings: of the collections; None for those that the collections remember.
        options: those of every engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        folder: Path,
        remote: str | None = None,
        *,
        kv_dir: Path | None = None,
        database: Database | None = None,
        embeddings: Embeddings | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.scheduler = scheduler
        self._kv, self._remote, self._options = kv_dir or folder / "kv", remote, options
        self._database = database or Database(folder / "chroma")
        self._embeddings = embeddings or Embeddings()
        self._engines: dict[str, Engine] = {}
        self._listeners: list[Listener] = []
        self._opening = threading.Lock()

    def engine(self, tenant: Tenant) -> Engine:
        """The engine of a tenant's namespace, opened at its first use.

        Raises StoreError if the folder cannot be used, InvalidOption for a wrong namespace.
        """
        with self._opening:
            if (engine := self._engines.get(tenant.namespace)) is None:
                store = ChunkStore(self._kv, namespace=tenant.namespace, remote=self._remote)
                engine = Engine(
                    self.scheduler.model, store, scheduler=self.scheduler, **self._options
                )
                engine.listeners += self._listeners
                self._engines[tenant.namespace] = engine
            return engine

    def listen(self, listener: Listener) -> None:
        """Call the listener at the end of each answer of all engines, present and later ones."""
        with self._opening:
            self._listeners.append(listener)
            for engine in self._engines.values():
                engine.listeners.append(listener)

    def link(self, tenant: Tenant, collection: str) -> ChromaLink:
        """A collection that the tenant may ask, and its caches.

        Raises:
            UnknownOption: it does not exist or is another tenant's, with the same message.
            StoreError: the Chroma database cannot be used, or the caches belong to another one.
        """
        if collection not in tenant.collections:
            raise UnknownOption.among("collection", collection, tenant.collections or ["none"])
        engine = self.engine(tenant)
        try:
            opened = self._database.collection(collection)
            return ChromaLink(opened, engine, self._embeddings.of(opened))
        except UnknownOption:  # deleted meanwhile; the error would list collections of others
            raise UnknownOption(f"collection {collection!r} was deleted; ingest it again") from None
        except InvalidOption as error:  # the fault is the server's, not the client's
            raise StoreError(str(error)) from error

"""The engines behind a server, one a namespace: caches apart, the model and its thread shared."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Unpack

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import EngineOptions
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.errors import InvalidOption, StoreError, UnknownOption
from samkv_integrations.server.keys import Tenant


class Tenancy:
    """Engines and collections, as each tenant may use them. For many threads.

    Args:
        scheduler: runs the model, for all.
        folder: holds the chunk caches under ``kv``, as ``samkv ingest --dir`` leaves them.
        remote: where machines share the chunk caches; None for nowhere.
        database: of the collections; None for the one under ``chroma`` in ``folder``.
        options: of every engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        folder: Path,
        remote: str | None = None,
        *,
        database: Database | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.scheduler = scheduler
        self._folder, self._remote, self._options = folder, remote, options
        self._database = database or Database(folder / "chroma")
        self._engines: dict[str, Engine] = {}
        self._opening = threading.Lock()

    def engine(self, tenant: Tenant) -> Engine:
        """The engine of a tenant's namespace, opened when it is first asked for.

        Raises StoreError if the folder cannot be used, InvalidOption for what is no namespace.
        """
        with self._opening:
            if (engine := self._engines.get(tenant.namespace)) is None:
                store = ChunkStore(
                    self._folder / "kv", namespace=tenant.namespace, remote=self._remote
                )
                engine = Engine(
                    self.scheduler.model, store, scheduler=self.scheduler, **self._options
                )
                self._engines[tenant.namespace] = engine
            return engine

    def link(self, tenant: Tenant, collection: str) -> ChromaLink:
        """A collection that the tenant may ask, and its caches.

        Raises:
            UnknownOption: it may not, or there is none; the same, so that it tells nothing.
            StoreError: there is no Chroma database that can be used, or it is another's.
        """
        if collection not in tenant.collections:
            raise UnknownOption.among("collection", collection, tenant.collections or ["none"])
        engine = self.engine(tenant)
        try:
            return ChromaLink(self._database.collection(collection), engine)
        except UnknownOption:  # deleted meanwhile; the error lists the collections of others
            raise UnknownOption(f"collection {collection!r} is gone; ingest it again") from None
        except InvalidOption as error:  # the server's fault, and no client's
            raise StoreError(str(error)) from error

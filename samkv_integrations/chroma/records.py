"""The records of a Chroma collection, page by page, and the claim of its database on caches."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from samkv_integrations.chroma.client import KEY_FIELD, chroma_errors
from samkv_integrations.errors import InvalidOption, StoreError
from samkv_integrations.store.indexed import IndexedStore

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from chromadb.api.types import GetResult
    from chromadb.types import Collection as CollectionModel

Metadata = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class IngestResult:
    """The result of `ChromaLink.add`.

    n_cached: chunks that were computed. n_hit: records whose chunk was cached before the call.
    n_evicted: chunks of this call that were evicted before its end, to make room.
    n_released: deleted caches of records that were replaced. bytes_on_disk: bytes written.
    """

    n_records: int
    n_cached: int
    n_hit: int
    n_evicted: int = 0
    n_released: int = 0
    seconds: float
    bytes_on_disk: int


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """The result of `ChromaLink.sync`.

    n_records: records of the collection. n_cached: chunks that were computed.
    n_linked: records whose key was missing or wrong, and was set.
    n_skipped: records without a text, or with a text that cannot be cached.
    n_evicted: chunks whose cache was evicted to make room. They are not computed again.
    n_pruned: unreferenced chunks that were deleted. n_in_grace: those that are too young for it.
    """

    n_records: int
    n_cached: int
    n_linked: int
    n_skipped: int
    n_evicted: int
    n_pruned: int
    n_in_grace: int
    bytes_freed: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """A record that a query found. ``text`` is exactly what was added.

    distance: less for better ones. Of `ChromaLink.query` it is Chroma's; of `ChromaLink.search`
    SQLite's BM25 or, with an embedding, minus the score of `fused`.
    """

    id: str
    text: str
    metadata: Metadata
    distance: float

    @property
    def source(self) -> str:
        """The file that ``samkv ingest`` has read; the record's id for other records."""
        return str(self.metadata.get("source", self.id))


PAGE_SIZE = 256
"""Most records of a page. An interruption loses at most one page of work.

The chunks of a page are computed together; caches differ in their last bits if other chunks share
their pass."""


class Records:
    """Reads and writes the records of a collection. Errors of Chroma become InvalidOption.

    Raises InvalidOption if ``collection`` is not of a synchronous client.
    """

    def __init__(self, collection: Collection) -> None:
        from chromadb.api.models.Collection import Collection as SyncCollection

        if not isinstance(collection, SyncCollection):
            raise InvalidOption(
                f"collection is a {type(collection).__name__}; it must be a Chroma collection, of "
                "open_collection, connect_collection or a synchronous chromadb client"
            )
        self.collection = collection
        # Only the client, which is private, knows the folder and the batch size.
        self._client = collection._client

    @property
    def folder(self) -> str | None:
        """The folder of the database; None if it is on a server or in memory."""
        settings = self._client.get_settings()
        return str(settings.persist_directory) if settings.is_persistent else None

    @property
    def place(self) -> str:
        """Folder or server, tenant and name of the database; "" if it is in memory."""
        from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

        settings = self._client.get_settings()
        names = self.collection.tenant, self.collection.database
        host, port = settings.chroma_server_host, settings.chroma_server_http_port
        place = f"{host}:{port}" if host else ""
        if self.folder is not None:
            place = str(Path(self.folder).resolve())
        is_default = names == (DEFAULT_TENANT, DEFAULT_DATABASE)
        return place if is_default or not place else f"{place} ({'/'.join(names)})"

    def check_sizes(self, embeddings: Sequence[Sequence[float]]) -> None:
        """Raises InvalidOption if embeddings differ in size, or from the collection's."""
        mine = [model for model in self.models() if model.id == self.collection.id]
        if not mine:
            raise InvalidOption(
                f"collection {self.collection.name!r} was deleted; open or create it again"
            )
        sizes = [mine[0].dimension, *map(len, embeddings)]
        known = [size for size in sizes if size is not None]
        if other := [size for size in known if size != known[0]]:
            raise InvalidOption(
                f"an embedding of dimension {other[0]} does not fit collection "
                f"{self.collection.name!r}, which takes dimension {known[0]}; embed with the model "
                "that the other records were embedded with, or use another collection"
            )

    def ids(self, where: Mapping[str, Any] | None) -> list[str]:
        ids: list[str] = self.read(self.collection, where=where, include=[])["ids"]
        return ids

    def sources(self) -> Iterator[tuple[str, str]]:
        """Id and ``source`` of each record that has a ``source``."""
        for found in self.pages(self.ids(None), ["metadatas"]):
            for id_, row in zip(found["ids"], found["metadatas"] or (), strict=True):
                if row and "source" in row:
                    yield id_, str(row["source"])

    def keys(self, ids: Sequence[str] | None = None) -> set[str]:
        """The keys in the metadata of records. ids: those of the records; None for all."""
        pages = self.pages(self.ids(None) if ids is None else ids, ["metadatas"])
        return {key for found in pages for key in keys_in(found)}

    def pages(
        self, ids: Sequence[str], include: list[str], where: Mapping[str, Any] | None = None,
        of: Collection | None = None,
    ) -> Iterator[GetResult]:  # fmt: skip
        """The records with these ids, page by page. of: a collection; None for this one."""
        for part in self.slices(len(ids)):
            collection = of or self.collection
            yield self.read(collection, ids=list(ids[part]), where=where, include=include)

    def slices(self, n_records: int) -> Iterator[slice]:
        """Slices of ``n_records`` records, none larger than Chroma reads or writes at once."""
        with chroma_errors("Chroma did not tell how many records it takes at once"):
            allowed = self._client.get_max_batch_size()  # -1 if a server does not say
        size = min(allowed, PAGE_SIZE) if allowed > 0 else PAGE_SIZE
        return (slice(at, at + size) for at in range(0, n_records, size))

    def models(self) -> Sequence[CollectionModel]:
        """All collections of this database."""
        with chroma_errors("Chroma cannot list its collections"):
            return self._client.list_collections(
                tenant=self.collection.tenant, database=self.collection.database
            )

    def collections(self) -> list[Collection]:
        kind = type(self.collection)
        return [
            kind(client=self._client, model=model, embedding_function=None)
            for model in self.models()
        ]

    def read(
        self,
        collection: Collection,
        *,
        include: list[str],
        ids: list[str] | None = None,
        where: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> GetResult:
        """Some records of a collection; none for another collection that was deleted meanwhile."""
        from chromadb.errors import NotFoundError

        with chroma_errors(f"collection {collection.name!r} cannot be read"):
            try:
                return collection.get(
                    ids=ids,
                    where=dict(where) if where else None,
                    limit=limit,
                    include=cast("Any", include),
                )
            except NotFoundError:
                if collection.id == self.collection.id:
                    raise
                return cast("GetResult", {"ids": [], "documents": [], "metadatas": []})

    def write(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        rows: Sequence[Metadata | None],
        keys: Sequence[str | None],
    ) -> set[str]:
        """Write a page of records; returns the keys that only their former versions had."""
        before = self.read(self.collection, ids=list(ids), include=["metadatas"])
        old = dict(zip(before["ids"], before["metadatas"] or (), strict=True))
        # Chroma merges metadata into those of a known id; None removes a field.
        metadatas = [
            {**dict.fromkeys(old.get(id_) or ()), **(row or {}), KEY_FIELD: key}
            for id_, row, key in zip(ids, rows, keys, strict=True)
        ]
        with chroma_errors(
            f"collection {self.collection.name!r} refused the records (their chunks stay cached "
            "until they are added again, or pruned by sync)"
        ):
            self.collection.upsert(
                ids=list(ids),
                documents=list(texts),
                embeddings=list(embeddings),
                metadatas=cast("list[Any]", metadatas),
            )
        return keys_in(before) - set(keys)


def keys_in(found: GetResult) -> set[str]:
    """The keys in the metadata of these records."""
    metadatas = found["metadatas"] or ()
    return {str(row[KEY_FIELD]) for row in metadatas if row and row.get(KEY_FIELD)}


class Ownership:
    """The claim of a collection's database on the caches of a store's namespace.

    `ChromaLink.sync` deletes caches that no record of its database references. If two databases
    kept caches in one folder and namespace, each would delete the caches of the other. So a note in
    the store names the first database, and all others are refused.

    A database is recognised by the ids of its collections, so that it may be moved or copied, or
    else by its place. A database in memory writes no note, because it ends with its process.
    """

    def __init__(self, store: IndexedStore, records: Records) -> None:
        self._namespace, self._records, self._place = store.namespace, records, records.place
        name = hashlib.blake2b(store.namespace.encode(), digest_size=8).hexdigest()
        self._note = f"chroma-owner-{name}"
        self._notes = store.notes  # machines that share caches also share the note
        self._file = self._notes.note_place(self._note)
        self._is_shared = store.remote_url is not None
        if self._is_shared and records.folder is not None:
            self._place += f" on {socket.gethostname()}"  # folders may have the same name

    def claim(self) -> None:
        """Check that the caches belong to this database, and write that into the note.

        Raises InvalidOption if they do not, StoreError if the note is damaged or cannot be written.
        """
        mine = str(self._records.collection.id)
        owner = self._read()
        if owner is None and self._place:
            self._put([mine], replace=False)
            owner = self._read()  # another process may have been faster
        if owner is None:
            return
        place, known = owner
        if place != self._place:
            here = {str(model.id) for model in self._records.models()}
            if here.isdisjoint(known):
                raise self._refusal(place)
        if self._place and (place != self._place or mine not in known):
            self._put([*dict.fromkeys([*known, mine])], replace=True)

    def try_claim(self) -> None:
        """Like `claim`, but a failed write of the note is ignored: a store may be read-only."""
        try:
            self.claim()
        except _Damaged:
            raise
        except StoreError:  # read-only, or a remote tier that does not answer
            pass

    def _read(self) -> tuple[str, list[str]] | None:
        """Place and collections of the owner; None if there is no note."""
        if (text := self._notes.note(self._note)) is None:
            return None
        try:
            fields = json.loads(text)
            return str(fields["database"]), [str(id_) for id_ in fields["collections"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _Damaged(
                f"{self._file}, which names the database of the chunk caches, cannot be read, so "
                "no cache is deleted; delete the file, and open that database before any other"
            ) from error

    def _put(self, collections: list[str], *, replace: bool) -> None:
        text = json.dumps({"database": self._place, "collections": collections}, indent=2)
        self._notes.put_note(self._note, text, replace=replace)

    def _refusal(self, owner: str) -> InvalidOption:
        ways = "give each database a folder of caches (kv_dir, --dir) or a namespace of its own"
        if self._is_shared:
            ways = (
                "keep the records of all machines in one Chroma server (--chroma http://HOST:PORT "
                "of the commands, connect_collection), or give each database a remote tier or a "
                "namespace of its own"
            )
        return InvalidOption(
            f"the chunk caches in {self._notes.where} (namespace {self._namespace!r}) belong to "
            f"the Chroma database {owner}, and would be deleted, because "
            f"{self._place or 'the database in memory'} has no records of them; {ways}; if that "
            f"database is gone for good, delete {self._file}"
        )


class _Damaged(StoreError):
    """The note exists, but cannot be read."""

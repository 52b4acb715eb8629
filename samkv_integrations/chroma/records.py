"""The records of one Chroma collection, page by page, and its neighbours in the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.owner import Location
from samkv_integrations.chroma.results import KEY_FIELD, Metadata, Retrieved
from samkv_integrations.errors import EmptyInput, InvalidOption

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from chromadb.api.types import GetResult
    from chromadb.types import Collection as CollectionModel

PAGE_SIZE = 256
"""Records at once, if Chroma takes as many: a bar moves, and little is lost on an interruption.

Chunks of a page are computed together, and in which passes shows in the last bits of a cache."""


class Records:
    """What a link reads and writes of a collection. Chroma's complaints are InvalidOption here.

    Raises InvalidOption if ``collection`` is something else, such as an asynchronous client's.
    """

    def __init__(self, collection: Collection) -> None:
        from chromadb.api.models.Collection import Collection as SyncCollection

        if not isinstance(collection, SyncCollection):
            raise InvalidOption(
                f"{type(collection).__name__} is no Chroma collection; take one of "
                "open_collection, connect_collection or a synchronous chromadb client"
            )
        self.collection = collection
        # A collection has no public way to its client, which alone knows folder and batch size.
        self._client = collection._client

    @property
    def folder(self) -> str | None:
        """The folder of the database; None for a server's, or one in memory."""
        settings = self._client.get_settings()
        return str(settings.persist_directory) if settings.is_persistent else None

    @property
    def location(self) -> Location:
        """Where the database is."""
        from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

        settings, collection = self._client.get_settings(), self.collection
        names = (collection.tenant, collection.database)
        part = "" if names == (DEFAULT_TENANT, DEFAULT_DATABASE) else "/".join(names)
        if self.folder is not None:
            return Location(folder=str(Path(self.folder).resolve()), part=part)
        host, port = settings.chroma_server_host, settings.chroma_server_http_port
        return Location(server=f"{host}:{port}" if host else "", part=part)

    def check_sizes(self, embeddings: Sequence[Sequence[float]]) -> None:
        """Raises InvalidOption if they fit neither each other nor the collection."""
        expected = self.dimension()
        for embedding in embeddings:
            expected = len(embedding) if expected is None else expected
            if len(embedding) != expected:
                raise InvalidOption(
                    f"an embedding of dimension {len(embedding)} does not fit collection "
                    f"{self.collection.name!r}, which takes dimension {expected}; embed with the "
                    "model that the other records were embedded with, or use another collection"
                )

    def dimension(self) -> int | None:
        """Size of the collection's embeddings; None before the first one."""
        mine = [model for model in self.models() if model.id == self.collection.id]
        if not mine:
            raise InvalidOption(
                f"collection {self.collection.name!r} was deleted; open or create it again"
            )
        return mine[0].dimension

    def ids(self, where: Mapping[str, Any] | None) -> list[str]:
        ids: list[str] = self.read(self.collection, where=where, include=[])["ids"]
        return ids

    def keys(self, ids: Sequence[str] | None = None) -> set[str]:
        """The keys that records name. ids: which; None for all."""
        named, keys = self.ids(None) if ids is None else list(ids), set()
        for part in self.slices(len(named)):
            keys |= keys_in(self.read(self.collection, ids=named[part], include=["metadatas"]))
        return keys

    def slices(self, n_records: int) -> Iterator[slice]:
        """Pages of what Chroma is given or asked for at once."""
        with chroma_errors("Chroma does not say how much it takes at once"):
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
        """Some records. Another collection than ours may have been deleted: it has none."""
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
        """Writes one page of records; returns keys that records of these ids had and lost."""
        held = self.read(self.collection, ids=list(ids), include=["metadatas"])
        old = dict(zip(held["ids"], held["metadatas"] or (), strict=True))
        # Chroma merges metadata into those of a known id; None takes a field away.
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
        return keys_in(held) - set(keys)

    def query(self, embedding: Sequence[float], k: int) -> list[Retrieved]:
        """The ``k`` records nearest to ``embedding``, nearest first; fewer if there are fewer.

        Raises:
            EmptyInput: the collection is empty.
            InvalidOption: ``k`` is not positive, the embedding has another length than those in
                the collection, or a record was added without a text.
        """
        name = self.collection.name
        if k < 1:
            raise InvalidOption(f"{k} chunks to retrieve; ask for at least 1")
        with chroma_errors(f"collection {name!r} refused the query"):
            n_records = self.collection.count()
        if not n_records:
            raise EmptyInput(f"collection {name!r} is empty; ingest documents into it first")
        with chroma_errors(f"collection {name!r} refused the query"):
            found = self.collection.query(
                query_embeddings=[embedding],
                n_results=k,
                include=["documents", "metadatas", "distances"],
            )
        documents, metadatas, distances = found["documents"], found["metadatas"], found["distances"]
        assert documents and metadatas and distances  # they were asked for
        columns = found["ids"][0], documents[0], metadatas[0], distances[0]
        results = []
        for id_, text, metadata, distance in zip(*columns, strict=True):
            if text is None:
                raise InvalidOption(
                    f"record {id_!r} of collection {name!r} has no text; add it again with one"
                )
            results.append(
                Retrieved(id=id_, text=text, metadata=dict(metadata or {}), distance=distance)
            )
        return results


def keys_in(found: GetResult) -> set[str]:
    """The keys that records name."""
    metadatas = found["metadatas"] or ()
    return {str(row[KEY_FIELD]) for row in metadatas if row and row.get(KEY_FIELD)}

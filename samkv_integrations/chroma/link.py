"""The link between a Chroma collection and chunk caches, for every framework and for none.

Chroma keeps texts, embeddings and metadata; the store keeps the caches. What ties them is the key
in the metadata of each record, and even that can be computed again from the record's text:
`ChromaLink.sync` does, and whatever else keeps the two in step only saves it work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tqdm.auto import tqdm

from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.results import (
    KEY_FIELD,
    IngestResult,
    Metadata,
    Retrieved,
    SyncResult,
)
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import (
    EmptyInput,
    InvalidChunk,
    InvalidOption,
)

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from chromadb.api.types import GetResult
    from chromadb.types import Collection as CollectionModel

_PAGE_SIZE = 256
"""Records at once, if Chroma takes as many: a bar moves, and little is lost on an interruption."""


class ChromaLink:
    """A collection whose records have chunk caches.

    `add`, `delete` and `clear` keep records and caches in step. What goes past them (another
    client, a deleted collection, a crash) is mended by `sync`.

    A cache is kept while any collection of the same database needs it. Caches that serve a second
    database as well are not known here: give each database a folder of caches, or at least a
    namespace, of its own.

    Args:
        collection: a Chroma collection, see `open_collection` and `connect_collection`.
        engine: caches the chunks.

    Raises:
        InvalidOption: ``collection`` is something else, such as one of an asynchronous client; or
            the store of ``engine`` lies in the collection's own folder, where Chroma may clean up.
    """

    def __init__(self, collection: Collection, engine: Engine) -> None:
        from chromadb.api.models.Collection import Collection as SyncCollection

        if not isinstance(collection, SyncCollection):
            raise InvalidOption(
                f"{type(collection).__name__} is no Chroma collection; take one of "
                "open_collection, connect_collection or a synchronous chromadb client"
            )
        self.collection = collection
        self.engine = engine
        # A collection has no public way to its client, which alone knows folder and batch size.
        self._client = collection._client
        settings = self._client.get_settings()
        if settings.is_persistent and isinstance(engine.store, ChunkStore):
            folder, caches = Path(settings.persist_directory).resolve(), engine.store.path.resolve()
            if caches.is_relative_to(folder):
                raise InvalidOption(
                    f"the chunk caches in {caches} lie inside Chroma's folder {folder}; "
                    f"give a folder beside it, such as {folder.with_name(folder.name + '-kv')}"
                )

    # -- records and caches together --------------------------------------------------------

    def add(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        metadatas: Sequence[Metadata | None] | None = None,
        progress: bool = False,
        *,
        without_cache: Container[str] = (),
    ) -> IngestResult:
        """Cache the chunks, then write their records; records with these ids are replaced.

        What replaced records had is released. Calling it again after it was interrupted computes
        only what is missing. A record whose metadata hold the right key already is taken for cached
        if its file is there; all other caches are verified as a whole.

        without_cache: ids of records whose text is no chunk, such as that of an image.

        Raises:
            InvalidOption: lengths differ, an id occurs twice, an embedding has another size than
                the others in the collection, or Chroma refuses a record.
            InvalidChunk: a text is empty, or longer than the context window.
            StoreError: the store cannot be written.
        """
        began = time.perf_counter()
        rows: Sequence[Metadata | None] = [None] * len(ids) if metadatas is None else metadatas
        lengths = [len(ids), len(texts), len(embeddings), len(rows)]
        if len(set(lengths)) > 1:
            raise InvalidOption(
                "{} ids, {} texts, {} embeddings and {} metadatas; "
                "give one of each a record".format(*lengths)
            )
        if twice := [id_ for id_, count in Counter(ids).items() if count > 1]:
            raise InvalidOption(f"id {twice[0]!r} occurs twice; every record needs its own")
        self._check_sizes(embeddings)
        bytes_before = self.engine.store.stats().bytes
        # Everything is looked at before anything is computed or written.
        is_new = [
            None if id_ in without_cache else self._is_new(text, row)
            for id_, text, row in zip(ids, texts, rows, strict=True)
        ]
        new: set[str] = set()
        replaced: set[str] = set()
        with tqdm(total=len(ids), desc="caching chunks", disable=not progress) as bar:
            # Page by page, so that no cache waits for its record longer than `sync` has patience.
            for part in self._slices(len(ids)):
                keys, made = self._cache(texts[part], is_new[part])
                new |= made
                replaced |= self._write(ids[part], texts[part], embeddings[part], rows[part], keys)
                bar.update(len(keys))
        bytes_after = self.engine.store.stats().bytes
        self.release(replaced)
        return IngestResult(
            n_records=len(ids),
            n_cached=len(new),
            n_hit=len(ids) - is_new.count(None) - len(new),
            seconds=time.perf_counter() - began,
            bytes_on_disk=bytes_after - bytes_before,
        )

    def _check_sizes(self, embeddings: Sequence[Sequence[float]]) -> None:
        """Raises InvalidOption if they fit neither each other nor the collection."""
        expected = self._dimension()
        for embedding in embeddings:
            expected = len(embedding) if expected is None else expected
            if len(embedding) != expected:
                raise InvalidOption(
                    f"an embedding of dimension {len(embedding)} does not fit collection "
                    f"{self.collection.name!r}, which takes dimension {expected}; embed with the "
                    "model that the other records were embedded with, or use another collection"
                )

    def _dimension(self) -> int | None:
        """Size of the collection's embeddings; None before the first one."""
        mine = [model for model in self._models() if model.id == self.collection.id]
        if not mine:
            raise InvalidOption(
                f"collection {self.collection.name!r} was deleted; open or create it again"
            )
        return mine[0].dimension

    def _is_new(self, text: str, row: Metadata | None) -> bool:
        """Whether a record's chunk has to be computed. Raises InvalidChunk if it cannot be."""
        if row and KEY_FIELD in row:
            key = self.engine.key_of(text)
            if row[KEY_FIELD] == key and self.engine.store.contains(key, self.engine.fingerprint):
                return False
        return not self.engine.is_cached(text)

    def _cache(
        self, texts: Sequence[str], is_new: Sequence[bool | None]
    ) -> tuple[list[str | None], set[str]]:
        """Keys of the chunks, all of them cached and young now, and those that were computed.

        is_new: what `_is_new` said; None for a text that gets no cache, and no key.
        """
        keys: list[str | None] = [None] * len(texts)
        missing: dict[int, str] = {}
        for place, (text, new) in enumerate(zip(texts, is_new, strict=True)):
            if new is None:
                continue
            key, fingerprint = self.engine.key_of(text), self.engine.fingerprint
            if new or not self.engine.store.contains(key, fingerprint):
                missing[place] = text
            else:
                self.engine.store.touch(key, fingerprint)
                keys[place] = key
        made = self.engine.cache_chunks(list(missing.values()))
        for place, key in zip(missing, made, strict=True):
            keys[place] = key
        return keys, set(made)

    def _write(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        rows: Sequence[Metadata | None],
        keys: Sequence[str | None],
    ) -> set[str]:
        """Writes one page of records; returns keys that records of these ids had and lost."""
        held = self._read(self.collection, ids=list(ids), include=["metadatas"])
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
        return _keys_in(held) - set(keys)

    def delete(
        self, ids: Sequence[str] | None = None, where: Mapping[str, Any] | None = None
    ) -> int:
        """Delete records, and release the caches of their chunks; returns how many were deleted.

        ids, where: which records; with both, those of ``ids`` that match ``where``.

        Raises:
            InvalidOption: neither is given (see `clear`), or Chroma refuses one of them.
            StoreError: a cache cannot be deleted; the records are gone.
        """
        if not ids and not where:
            raise InvalidOption(
                "neither ids nor where names a record to delete; to delete all of them, use clear()"
            )
        if ids is not None and not ids:
            raise InvalidOption(
                "ids is empty: nothing to delete; leave it out to delete what matches where"
            )
        return self._delete(list(dict.fromkeys(ids)) if ids else self._ids(where), where or None)

    def clear(self) -> int:
        """Delete every record, and release the caches of their chunks, as `delete` does."""
        return self._delete(self._ids(None), None)

    def _delete(self, ids: Sequence[str], where: Mapping[str, Any] | None) -> int:
        keys: set[str] = set()
        for part in self._slices(len(ids)):
            found = self._read(
                self.collection, ids=list(ids[part]), where=where, include=["metadatas"]
            )
            keys |= _keys_in(found)
            if found["ids"]:
                with chroma_errors(f"collection {self.collection.name!r} refused to delete"):
                    self.collection.delete(ids=found["ids"])
        return self.release(keys)

    def release(self, keys: Iterable[str]) -> int:
        """Delete the caches of ``keys`` that no record references; returns how many there were.

        A record of any collection of this database counts if its metadata hold the key. One that
        was written without it counts from the next `sync` on.

        Raises:
            StoreError: a cache cannot be deleted.
        """
        unreferenced = set(keys)
        for collection in self._collections() if unreferenced else ():
            asked = sorted(unreferenced)
            for part in self._slices(len(asked)):
                unreferenced -= self._referenced(collection, asked[part])
        if unreferenced:  # what they were must not be held in memory either
            self.engine.prefixes.clear()
        return sum(self.engine.store.delete(key) for key in sorted(unreferenced))

    def _referenced(self, collection: Collection, keys: list[str]) -> set[str]:
        """Those of ``keys`` that a record of ``collection`` has."""
        found: set[str] = set()
        pending = keys
        while pending:
            # Thousands of records may share one key: asking for no more of them than there are
            # keys, and again without those that were found, reads little and comes to an end.
            rows = self._read(
                collection,
                where={KEY_FIELD: {"$in": pending}},
                limit=len(pending),
                include=["metadatas"],
            )
            found |= _keys_in(rows)
            if len(rows["ids"]) < len(pending):
                break
            pending = [key for key in pending if key not in found]
        return found

    # -- the truth --------------------------------------------------------------------------

    def sync(
        self,
        *,
        build_missing: bool = True,
        prune: bool = True,
        grace_s: float = 3600.0,
        progress: bool = False,
    ) -> SyncResult:
        """Bring caches and keys into line with the texts that the records have now.

        It may be interrupted at any moment, and goes on from there when it is called again; while
        nothing changes a second call does nothing. Caches count as there if their file is: whether
        files are sound is not looked at.

        build_missing: whether to cache the chunks that are not.
        prune: whether to delete the caches that nothing references: of this engine's fingerprint
            and this store's namespace, and of a text that is in no collection of this database.
        grace_s: seconds for which a cache is kept all the same, because the record that it was
            made for may be about to be written.
        progress: whether to show a progress bar, on standard error.

        Raises:
            InvalidOption: ``grace_s`` is negative, or Chroma cannot be read or written.
            StoreError: the store cannot be read or written.
        """
        if not grace_s >= 0:
            raise InvalidOption(f"grace_s={grace_s}; it must be at least 0 seconds")
        began = time.perf_counter()
        done: Counter[str] = Counter()
        referenced: set[str] = set()
        # All ids at once: between two pages by number a deletion would shift a record out of sight.
        ids = self._ids(None)
        desc = f"syncing {self.collection.name}"
        with tqdm(total=len(ids), desc=desc, disable=not progress) as bar:
            for part in self._slices(len(ids)):
                counts, keys = self._sync_page(ids[part], build_missing)
                done += counts
                referenced |= keys
                bar.update(len(ids[part]))
        if prune:
            done += self._prune(referenced, grace_s)
        return SyncResult(
            n_records=done["records"],
            n_cached=done["cached"],
            n_linked=done["linked"],
            n_skipped=done["skipped"],
            n_pruned=done["pruned"],
            n_in_grace=done["in_grace"],
            bytes_freed=done["bytes_freed"],
            seconds=time.perf_counter() - began,
        )

    def _sync_page(self, ids: list[str], build_missing: bool) -> tuple[Counter[str], set[str]]:
        """Syncs some records; returns counts and the keys of their texts."""
        rows = self._read(self.collection, ids=ids, include=["documents", "metadatas"])
        documents, metadatas = rows["documents"], rows["metadatas"]
        assert documents is not None and metadatas is not None  # they were asked for
        keys: dict[str, str | None] = {}
        missing: dict[str, str] = {}
        for id_, text in zip(rows["ids"], documents, strict=True):
            keys[id_], is_missing = self._look_up(text)
            if is_missing and build_missing:
                missing[id_] = text
        made = self.engine.cache_chunks(list(missing.values()))
        keys.update(zip(missing, made, strict=True))
        linked = {
            id_: keys[id_]
            for id_, metadata in zip(rows["ids"], metadatas, strict=True)
            if (metadata or {}).get(KEY_FIELD) != keys[id_]
        }
        if linked:
            with chroma_errors(f"collection {self.collection.name!r} refused keys"):
                # merged into what else a record has; None takes the key of a former text away
                self.collection.update(
                    ids=list(linked),
                    metadatas=[{KEY_FIELD: key} for key in linked.values()],
                )
        counts = Counter(
            records=len(keys),
            cached=len(set(made)),
            linked=sum(key is not None for key in linked.values()),
            skipped=sum(key is None for key in keys.values()),
        )
        return counts, {key for key in keys.values() if key is not None}

    def _look_up(self, text: str | None) -> tuple[str | None, bool]:
        """The key of a record's text, None if it can be no chunk; and whether it lacks a cache."""
        if text is None or not normalise(text):
            return None, False
        key = self.engine.key_of(text)
        if self.engine.store.contains(key, self.engine.fingerprint):
            return key, False
        try:
            return key, not self.engine.is_cached(text)
        except InvalidChunk:
            return None, False

    def _prune(self, referenced: set[str], grace_s: float) -> Counter[str]:
        """Deletes old caches that neither ``referenced`` nor another collection names."""
        store, fingerprint = self.engine.store, self.engine.fingerprint
        for collection in self._collections():
            if collection.id != self.collection.id:
                referenced = referenced | self._keys_of_texts(collection)
        bytes_before = store.stats().bytes
        n_pruned = n_in_grace = 0
        for key in store.keys(fingerprint):
            if key in referenced or not self._is_own(key):
                continue
            age_s = store.age_s(key, fingerprint)
            if age_s is None:  # another process deleted it
                continue
            if age_s < grace_s:
                n_in_grace += 1
            else:
                n_pruned += store.delete(key)
        # Another process may have added more than was deleted here.
        freed = max(0, bytes_before - store.stats().bytes)
        return Counter(pruned=n_pruned, in_grace=n_in_grace, bytes_freed=freed)

    def _is_own(self, key: str) -> bool:
        """Whether a chunk belongs to this store's namespace, as far as its text can tell.

        In another namespace the same text has another key, and other people's collections.
        """
        text = self.engine.store.text(key)
        return text is not None and self.engine.key_of(text) == key

    def _keys_of_texts(self, collection: Collection) -> set[str]:
        ids, keys = self._read(collection, include=[])["ids"], set()
        for part in self._slices(len(ids)):
            rows = self._read(collection, ids=ids[part], include=["documents"])
            texts = (text for text in rows["documents"] or () if text and normalise(text))
            keys |= {self.engine.key_of(text) for text in texts}
        return keys

    # -- Chroma -----------------------------------------------------------------------------

    def _ids(self, where: Mapping[str, Any] | None) -> list[str]:
        ids: list[str] = self._read(self.collection, where=where, include=[])["ids"]
        return ids

    def _slices(self, n_records: int) -> Iterator[slice]:
        """Pages of what Chroma is given or asked for at once."""
        with chroma_errors("Chroma does not say how much it takes at once"):
            allowed = self._client.get_max_batch_size()  # -1 if a server does not say
        size = min(allowed, _PAGE_SIZE) if allowed > 0 else _PAGE_SIZE
        return (slice(at, at + size) for at in range(0, n_records, size))

    def _models(self) -> Sequence[CollectionModel]:
        """All collections of this database."""
        with chroma_errors("Chroma cannot list its collections"):
            return self._client.list_collections(
                tenant=self.collection.tenant, database=self.collection.database
            )

    def _collections(self) -> list[Collection]:
        kind = type(self.collection)
        return [
            kind(client=self._client, model=model, embedding_function=None)
            for model in self._models()
        ]

    def _read(
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

    # -- questions --------------------------------------------------------------------------

    def query(self, embedding: Sequence[float], k: int) -> list[Retrieved]:
        """The ``k`` records nearest to ``embedding``, nearest first; fewer if there are fewer.

        Raises:
            EmptyInput: the collection is empty.
            InvalidOption: ``k`` is not positive, the embedding has another length than those in
                the collection, or a record was added without a text.
        """
        name = self.collection.name
        if k < 1:
            raise InvalidOption(f"k={k}; it must be at least 1")
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


def _keys_in(found: GetResult) -> set[str]:
    """The keys that records name."""
    metadatas = found["metadatas"] or ()
    return {str(row[KEY_FIELD]) for row in metadatas if row and row.get(KEY_FIELD)}

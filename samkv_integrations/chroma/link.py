"""The link between a Chroma collection and chunk caches, for every framework and for none.

Chroma keeps texts, embeddings and metadata; the store keeps the caches. What ties them is the key
in the metadata of each record, and even that can be computed again from the record's text:
`ChromaLink.sync` does, and whatever else keeps the two in step only saves it work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from samkv_integrations.cache.chunk import ChunkRef
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.existing import warn_if_uncached
from samkv_integrations.chroma.owner import Ownership
from samkv_integrations.chroma.records import Records, keys_in
from samkv_integrations.chroma.results import (
    KEY_FIELD,
    IngestResult,
    Metadata,
    Retrieved,
    SyncResult,
)
from samkv_integrations.chroma.sync import Sync
from samkv_integrations.engine.chunks import Depth
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption, StoreError

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection


class ChromaLink:
    """A collection whose records have chunk caches.

    `add`, `delete` and `clear` keep records and caches in step. What goes past them (another
    client, a deleted collection, a crash) is mended by `sync`.

    A cache is kept while any collection of the same database needs it. Nothing is known of other
    databases, other tenants' included, so one that would share the caches is refused: each needs
    a folder of caches, or at least a namespace, of its own. Databases in memory may follow each
    other, as they end with their process.

    Args:
        collection: a Chroma collection, see `open_collection` and `connect_collection`.
        engine: caches the chunks.

    Raises:
        InvalidOption: ``collection`` is something else, such as one of an asynchronous client; or
            the store of ``engine`` lies in the collection's own folder, where Chroma may clean up;
            or its caches are another database's.
        StoreError: the note that says whose the caches are is damaged.
    """

    def __init__(self, collection: Collection, engine: Engine) -> None:
        self._records = Records(collection)
        self.engine = engine
        if self._records.folder is not None and isinstance(engine.store, ChunkStore):
            folder, caches = Path(self._records.folder).resolve(), engine.store.path.resolve()
            if caches.is_relative_to(folder):
                raise InvalidOption(
                    f"the chunk caches in {caches} lie inside Chroma's folder {folder}; "
                    f"give a folder beside it, such as {folder.with_name(folder.name + '-kv')}"
                )
        self._owner = Ownership(
            engine.store,
            self._records.location,
            str(collection.id),
            lambda: [str(model.id) for model in self._records.models()],
        )
        self._owner.try_claim()

    @property
    def collection(self) -> Collection:
        """The collection, for what a link does not do."""
        return self._records.collection

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
        build_missing: bool = True,
    ) -> IngestResult:
        """Cache the chunks, then write their records; records with these ids are replaced.

        What replaced records had is released. After an interruption only what is missing is
        computed. What this process has cached a moment ago (`Engine.cache_chunks`), and a record
        that names the right key already, is taken for cached if its file is there; else all of a
        cache is verified.

        without_cache: ids of records whose text is no chunk, such as that of an image.
        build_missing: whether to cache the chunks that are not. If other processes have just done
            it, no cache is read here, and one that had to make room again is left so.

        Raises:
            InvalidOption: lengths differ, an id occurs twice, an embedding has another size than
                the others in the collection, or Chroma refuses a record.
            InvalidChunk: a text is empty, or longer than the context window.
            StoreError: the store cannot be written, or caches of replaced records not deleted.
        """
        began = time.perf_counter()
        rows = self.check(ids, texts, embeddings, metadatas)
        # All is looked at before anything is computed or written.
        chunks = self._look_up(ids, texts, rows, without_cache, build_missing)
        self._check_release(self._records.keys(ids) - {chunk.key for chunk in chunks if chunk})
        missing = [chunk for chunk in chunks if chunk and chunk.state == "missed"]
        missed = {chunk.key: chunk for chunk in missing if build_missing}
        replaced = self._write(ids, texts, embeddings, rows, chunks, build_missing, progress)
        self._release(replaced)
        store, fingerprint = self.engine.store, self.engine.fingerprint
        return IngestResult(
            n_records=len(ids),
            n_cached=len(missed),
            n_hit=sum(chunk is not None for chunk in chunks) - len(missed or missing),
            n_evicted=sum(
                store.is_evicted(key, fingerprint)
                for key in {chunk.key for chunk in chunks if chunk}
                if missed  # else nothing needed room
            ),
            seconds=time.perf_counter() - began,
            bytes_on_disk=self.engine.chunks.n_bytes(list(missed.values())),
        )

    def check(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        metadatas: Sequence[Metadata | None] | None = None,
    ) -> Sequence[Metadata | None]:
        """What `add` looks at before chunks; returns the metadata of each record.

        Raises InvalidOption as `add` does.
        """
        rows: Sequence[Metadata | None] = [None] * len(ids) if metadatas is None else metadatas
        _check_lengths(ids, texts, embeddings, rows)
        self._records.check_sizes(embeddings)
        return rows

    def _look_up(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        rows: Sequence[Metadata | None],
        without_cache: Container[str],
        build_missing: bool,
    ) -> list[ChunkRef | None]:
        """The chunk of each record, None for one that gets no cache."""
        chunks = self.engine.chunks
        places = [place for place, id_ in enumerate(ids) if id_ not in without_cache]
        found = chunks.refer([texts[place] for place in places])
        chunks.require_fit(found)
        at_place: dict[int, ChunkRef] = {}
        for place, ref in zip(places, chunks.agree(found), strict=True):
            is_named = (rows[place] or {}).get(KEY_FIELD) == ref.key
            is_prepared = chunks.take_prepared(ref)
            depth: Depth = "whole"
            if is_named or is_prepared or not build_missing:
                depth = "exists"
            (at_place[place],) = chunks.look_up([ref], depth)
        return [at_place.get(place) for place in range(len(ids))]

    def _write(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        rows: Sequence[Metadata | None],
        chunks: Sequence[ChunkRef | None],
        build_missing: bool,
        progress: bool,
    ) -> set[str]:
        """Computes what is missing and writes the records; returns keys that records lost."""
        replaced: set[str] = set()
        computed: set[str] = set()
        with tqdm(total=len(ids), desc="caching chunks", disable=not progress) as bar:
            # Page by page, so that no cache waits for its record longer than `sync` has patience.
            for part in self._records.slices(len(ids)):
                page = [chunk for chunk in chunks[part] if chunk and chunk.key not in computed]
                if build_missing:
                    self.engine.chunks.compute(page, on_written=bar.update)
                computed |= {chunk.key for chunk in page}
                keys = [chunk.key if chunk else None for chunk in chunks[part]]
                replaced |= self._records.write(
                    ids[part], texts[part], embeddings[part], rows[part], keys
                )
                bar.update(
                    min(part.stop, len(ids)) - bar.n
                )  # with those that had a cache, or need none
        return replaced

    def delete(
        self, ids: Sequence[str] | None = None, where: Mapping[str, Any] | None = None
    ) -> int:
        """Delete records, and release the caches of their chunks; returns how many were deleted.

        ids, where: which records; with both, those of ``ids`` that match ``where``.

        Raises:
            InvalidOption: neither is given (see `clear`), or Chroma refuses one of them.
            StoreError: the caches cannot be deleted, such as while a remote tier does not answer;
                the records are there still, unless the error says that they are gone.
        """
        if not ids and not where:
            raise InvalidOption(
                "neither ids nor where names a record to delete; to delete all of them, use clear()"
            )
        if ids is not None and not ids:
            raise InvalidOption(
                "ids is empty: nothing to delete; leave it out to delete what matches where"
            )
        return self._delete(
            list(dict.fromkeys(ids)) if ids else self._records.ids(where), where or None
        )

    def clear(self) -> int:
        """Delete every record, and release the caches of their chunks, as `delete` does."""
        return self._delete(self._records.ids(None), None)

    def _delete(self, ids: Sequence[str], where: Mapping[str, Any] | None) -> int:
        doomed: list[str] = []
        keys: set[str] = set()
        for part in self._records.slices(len(ids)):
            found = self._records.read(
                self.collection, ids=list(ids[part]), where=where, include=["metadatas"]
            )
            doomed += found["ids"]
            keys |= keys_in(found)
        self._check_release(keys)
        for part in self._records.slices(len(doomed)):
            with chroma_errors(f"collection {self.collection.name!r} refused to delete"):
                self.collection.delete(ids=doomed[part])
        return self._release(keys)

    def _check_release(self, keys: set[str]) -> None:
        """Raises StoreError if caches cannot be deleted: asked while their records are there.

        Without records nothing would know of them any more, until the next `sync`.
        """
        if keys:
            store = self.engine.store
            store.check_delete(*store.same_texts(*keys))

    def _release(self, keys: set[str]) -> int:
        """`release` of keys whose records are written or gone, which no second try would name."""
        try:
            return self.release(keys)
        except StoreError as error:
            raise StoreError(
                f"the records are gone or replaced, but not all of their caches ({error}); they go "
                "with kv_link.sync(grace_s=0), or 'samkv store sync --grace 0'"
            ) from error

    def release(self, keys: Iterable[str]) -> int:
        """Delete the caches of ``keys`` that no record references; returns how many there were.

        What other models made of the same texts goes too, and with all of them the texts. A record
        of any collection of this database counts if its metadata hold the key. One that was written
        without it counts from the next `sync` on.

        Raises:
            StoreError: a cache cannot be deleted.
        """
        unreferenced = self._unreferenced(set(keys))
        if not unreferenced:
            return 0
        store = self.engine.store
        of_others = store.same_texts(*unreferenced) - unreferenced
        unreferenced |= self._unreferenced(of_others)
        return self.engine.delete(unreferenced)

    def _unreferenced(self, keys: set[str]) -> set[str]:
        """Those of ``keys`` that no record of any collection has."""
        left = set(keys)
        for collection in self._records.collections() if left else ():
            asked = sorted(left)
            for part in self._records.slices(len(asked)):
                left -= self._referenced(collection, asked[part])
        return left

    def _referenced(self, collection: Collection, keys: list[str]) -> set[str]:
        """Those of ``keys`` that a record of ``collection`` has."""
        found: set[str] = set()
        pending = keys
        while pending:
            # Thousands of records may share one key: asking for no more of them than there are
            # keys, and again without those that were found, reads little and comes to an end.
            rows = self._records.read(
                collection,
                where={KEY_FIELD: {"$in": pending}},
                limit=len(pending),
                include=["metadatas"],
            )
            found |= keys_in(rows)
            if len(rows["ids"]) < len(pending):
                break
            pending = [key for key in pending if key not in found]
        return found

    def adopt(self, *, cache_existing: bool) -> None:
        """For records that are there already: cache them now, or warn if they have no caches.

        cache_existing: whether to cache and link all that is not, as `sync` without pruning, with a
            progress bar. Else a few records are looked at, and if none of them has a cache, as
            another vector store or another model has left them, a warning is logged.

        Raises InvalidOption or StoreError as `sync` does.
        """
        if cache_existing:
            self.sync(prune=False, progress=True)
        else:
            warn_if_uncached(self._records, self.engine)

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
        files are sound is not looked at. A cache that was evicted for want of room is left so, or
        it would push out another one, and that one it: a question that needs it computes it.

        build_missing: whether to cache the chunks that are not.
        prune: whether to delete what nothing references: caches and texts of this store's
            namespace, whatever model they are of, whose text is in no collection of this database.
        grace_s: seconds for which a cache is kept all the same, because the record that it was
            made for may be about to be written.
        progress: whether to show a progress bar, on standard error.

        Raises:
            InvalidOption: ``grace_s`` is negative, Chroma cannot be read or written, or the caches
                have become another database's meanwhile; nothing is deleted then.
            StoreError: the store cannot be read or written.
        """
        if not grace_s >= 0:
            raise InvalidOption(f"grace_s={grace_s}; it must be at least 0 seconds")
        work = Sync(self._records, self.engine, self._owner, build_missing=build_missing)
        return work.run(grace_s=grace_s if prune else None, progress=progress)

    # -- questions --------------------------------------------------------------------------

    def query(self, embedding: Sequence[float], k: int) -> list[Retrieved]:
        """The ``k`` records nearest to ``embedding``, nearest first; fewer if there are fewer.

        Raises:
            EmptyInput: the collection is empty.
            InvalidOption: ``k`` is not positive, the embedding has another length than those in
                the collection, or a record was added without a text.
        """
        return self._records.query(embedding, k)


def _check_lengths(
    ids: Sequence[str], texts: Sequence[str], embeddings: Sequence[object], rows: Sequence[object]
) -> None:
    lengths = [len(ids), len(texts), len(embeddings), len(rows)]
    if len(set(lengths)) > 1:
        raise InvalidOption(
            "{} ids, {} texts, {} embeddings and {} metadatas; give one of each a record".format(
                *lengths
            )
        )
    if twice := [id_ for id_, count in Counter(ids).items() if count > 1]:
        raise InvalidOption(f"id {twice[0]!r} occurs twice; every record needs its own")

"""The link between a Chroma collection and chunk caches, for every framework and for none.

Chroma keeps texts, embeddings and metadata; the store keeps the caches. The metadata of each record
hold the key of its cache. A key can be computed from the record's text, so `ChromaLink.sync` can
always restore both keys and caches.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from samkv_integrations.chroma.client import KEY_FIELD, chroma_errors
from samkv_integrations.chroma.embedding import Embedding, HashingEmbedding
from samkv_integrations.chroma.records import (
    PAGE_SIZE,
    IngestResult,
    Metadata,
    Ownership,
    Records,
    Retrieved,
    SyncResult,
    keys_in,
)
from samkv_integrations.chroma.search import by_question, by_vector
from samkv_integrations.chroma.words import WordIndex, remove_others
from samkv_integrations.chunks.caching import progress_bar
from samkv_integrations.errors import InvalidOption, StoreError
from samkv_integrations.store.chunk import ChunkRef, normalise

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from chromadb.api.types import GetResult

    from samkv_integrations.engine import Engine

_SAMPLE = 16
"""Records of which `ChromaLink.adopt` checks whether they have caches."""

_log = logging.getLogger(__name__)


class ChromaLink:
    """A collection whose records have chunk caches.

    `add`, `delete` and `clear` change records and caches together. After changes by another client,
    a deleted collection or a crash, call `sync`.

    A cache is kept while any collection of the same database references it. Another database, such
    as that of another Chroma tenant, needs a folder of caches or a namespace of its own.

    Args:
        collection: a Chroma collection, see `open_collection` and `connect_collection`.
        engine: caches the chunks.
        embedding: the records' own, by which `search` finds them too, see `Embeddings`; None to
            find them by words alone.

    Raises:
        InvalidOption: ``collection`` is not of a synchronous client; or the store of ``engine``
            lies in the database's folder, where Chroma may delete files; or the caches belong to
            another database.
        StoreError: the note that names the caches' database is damaged.
    """

    def __init__(
        self, collection: Collection, engine: Engine, embedding: Embedding | None = None
    ) -> None:
        self._records = Records(collection)
        self.engine, self.embedding = engine, embedding
        if self._records.folder is not None and engine.store.path is not None:
            folder, caches = Path(self._records.folder).resolve(), engine.store.path.resolve()
            if caches.is_relative_to(folder):
                raise InvalidOption(
                    f"the chunk caches in {caches} lie inside Chroma's folder {folder}; "
                    f"give a folder beside it, such as {folder.with_name(folder.name + '-kv')}"
                )
        self._words = WordIndex.of(self._records, engine.store.path, engine.store.namespace)
        self._owner = Ownership(engine.store, self._records)
        self._owner.try_claim()

    @property
    def collection(self) -> Collection:
        """The Chroma collection, for calls that need no caches."""
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
        """Cache the chunks, then write their records. Records with the same ids are replaced.

        Caches of replaced records are released. After an interruption the same call computes only
        what is missing. A cache is verified as a whole, unless this process has just made it or the
        record already names it: in these cases its file need only exist.

        without_cache: ids of records whose text must not be cached, such as the text of an image.
        build_missing: whether to compute missing caches. Give False after other processes have
            computed them: then this process reads no cache, and computes no evicted one again.

        Raises:
            InvalidOption: lengths differ, an id occurs twice, an embedding has another size than
                the others in the collection, or Chroma refuses a record.
            InvalidChunk: a text is empty, or longer than the context window.
            StoreError: the store cannot be written, or a cache of a replaced record cannot be
                deleted.
        """
        adding = Adding(self, build_missing=build_missing)
        # Everything is checked before anything is computed or written.
        found = adding.check(ids, texts, embeddings, metadatas, without_cache=without_cache)
        with progress_bar(found.chunks, is_shown=progress) as bar:
            adding.write(found, on_written=bar.update)
        return adding.finish()

    def vectors(
        self, ids: Sequence[str], texts: Sequence[str], *, progress: bool = False
    ) -> list[list[float]]:
        """The embeddings of records for `add`; hashed words if the link has no embedding.

        A record that already has this text keeps its vector.

        progress: whether to show a progress bar on standard error.

        Raises what the embedding does, InvalidOption if Chroma cannot be read.
        """
        if self.embedding is None:
            return HashingEmbedding().embed(texts)
        wanted = dict(zip(ids, texts, strict=True))
        found = dict[str, list[float]]()  # text -> vector
        for page in self._records.pages([*wanted], ["documents", "embeddings"]):
            rows = zip(page["ids"], page["documents"] or (), page["embeddings"], strict=True)  # type: ignore[arg-type]
            found |= {text: [*map(float, row)] for id_, text, row in rows if text == wanted[id_]}
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        with tqdm(total=len(missing), desc="embedding", disable=not progress, leave=False) as bar:
            for start in range(0, len(missing), PAGE_SIZE):
                part = missing[start : start + PAGE_SIZE]
                found |= zip(part, self.embedding.embed(part), strict=True)
                bar.update(len(part))
        return [found[text] for text in texts]

    def check(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        metadatas: Sequence[Metadata | None] | None = None,
    ) -> Sequence[Metadata | None]:
        """Check the arguments of `add`; returns the metadata of each record."""
        rows: Sequence[Metadata | None] = [None] * len(ids) if metadatas is None else metadatas
        if len({len(ids), len(texts), len(embeddings), len(rows)}) > 1:
            raise InvalidOption(
                f"{len(ids)} ids, {len(texts)} texts, {len(embeddings)} embeddings and {len(rows)} "
                "metadatas; give one of each for every record"
            )
        if twice := [id_ for id_, count in Counter(ids).items() if count > 1]:
            raise InvalidOption(f"id {twice[0]!r} occurs twice; give every record its own")
        self._records.check_sizes(embeddings)
        return rows

    def delete(
        self, ids: Sequence[str] | None = None, where: Mapping[str, Any] | None = None
    ) -> int:
        """Delete records and release the caches of their chunks; returns how many were deleted.

        ids, where: which records. With both, those of ``ids`` that match ``where``.

        Raises:
            InvalidOption: neither is given (see `clear`), or Chroma refuses one of them.
            StoreError: the caches cannot be deleted. The records still exist, unless the error says
                that they were deleted.
        """
        if isinstance(ids, str):  # each of its characters would count as an id
            raise InvalidOption(f"ids={ids!r:.60} is one id; give a list of ids")
        if not ids and (ids is not None or not where):
            raise InvalidOption(
                f"ids={ids!r} and where={where!r} name no record to delete; to delete all of them, "
                "use clear()"
            )
        return self._delete(
            list(dict.fromkeys(ids)) if ids else self._records.ids(where), where or None
        )

    def clear(self) -> int:
        """Delete all records and release the caches of their chunks, as `delete` does."""
        return self._delete(self._records.ids(None), None)

    def _delete(self, ids: Sequence[str], where: Mapping[str, Any] | None) -> int:
        doomed: list[str] = []
        keys: set[str] = set()
        for found in self._records.pages(ids, ["metadatas"], where):
            doomed += found["ids"]
            keys |= keys_in(found)
        self._check_release(keys)
        for part in self._records.slices(len(doomed)):
            with chroma_errors(f"collection {self.collection.name!r} refused to delete"):
                self.collection.delete(ids=doomed[part])
        self._words.delete(doomed)
        return self._release(keys)

    def _check_release(self, keys: set[str]) -> None:
        """Raises StoreError, before records are deleted, if their caches could not be."""
        if keys:
            store = self.engine.store
            store.check_delete(*store.same_texts(*keys))

    def _release(self, keys: set[str]) -> int:
        """`release` after records have changed: a second `delete` would not find the keys."""
        try:
            return self.release(keys)
        except StoreError as error:
            raise StoreError(
                f"the records were deleted or replaced, but some of their caches remain ({error})"
                "; delete these with kv_link.sync(grace_s=0), or 'samkv store sync --grace 0'"
            ) from error

    def release(self, keys: Iterable[str]) -> int:
        """Delete the caches of ``keys`` that no record references; returns how many there were.

        Caches of the same texts by other models are deleted, too, and then the texts. A record of
        any collection of this database is a reference if its metadata hold the key, which `sync`
        writes. A chunk that is added again within a minute is not computed again.

        Raises StoreError if a cache cannot be deleted.
        """
        unreferenced = self._unreferenced(set(keys))
        if not unreferenced:
            return 0
        store = self.engine.store
        of_others = store.same_texts(*unreferenced) - unreferenced
        unreferenced |= self._unreferenced(of_others)
        return self.engine.delete(unreferenced, is_final=False)

    def _unreferenced(self, keys: set[str]) -> set[str]:
        """The ``keys`` that no record of any collection references."""
        left = set(keys)
        for collection in self._records.collections() if left else ():
            asked = sorted(left)
            for part in self._records.slices(len(asked)):
                named = {KEY_FIELD: {"$in": asked[part]}}
                left -= keys_in(self._records.read(collection, where=named, include=["metadatas"]))
        return left

    # -- records that others wrote ----------------------------------------------------------

    def adopt(self, *, cache_existing: bool) -> None:
        """Cache all existing records as `sync` does, or warn if a few of them have no caches.

        Records have no caches if they were written with another vector store or another model.
        """
        if cache_existing:
            self.sync(prune=False, progress=True)
            return
        rows = self._records.read(self.collection, limit=_SAMPLE, include=["documents"])
        chunks, store = self.engine.chunks, self.engine.store
        found = chunks.refer([text for text in rows["documents"] or () if text])
        fit = [ref for ref in found if chunks.fits(ref)]
        if not fit or any(ref.state == "cached" for ref in chunks.look_up(fit, "exists")):
            return
        _log.warning(
            "the records of collection %r that were checked have no chunk cache in %s (namespace "
            "%r, model %r): prompts reuse none of them. Next step: give cache_existing=True, or "
            "call kv_link.sync(), or run 'samkv store sync'",
            self.collection.name, store.where,
            store.namespace, self.engine.model.name,
        )  # fmt: skip

    def sync(
        self,
        *,
        build_missing: bool = True,
        prune: bool = True,
        grace_s: float = 3600.0,
        progress: bool = False,
    ) -> SyncResult:
        """Make caches and keys agree with the present texts of the records.

        It may be interrupted at any moment; the next call continues. A cache counts as present if
        its file exists. An evicted cache is computed again only if there is room for it, so that it
        does not evict another one.

        build_missing: whether to compute missing caches.
        prune: whether to delete unreferenced chunks: caches and texts of this store's namespace, of
            any model, whose text is in no collection of this database.
        grace_s: age in seconds up to which unreferenced caches are kept, because another process
            may be about to write their records.
        progress: whether to show a progress bar on standard error.

        Raises:
            InvalidOption: ``grace_s`` is negative, Chroma cannot be read or written, or the caches
                belong to another database by now. Nothing is deleted then.
            StoreError: the store cannot be read or written.
        """
        if not grace_s >= 0:
            raise InvalidOption(f"grace_s={grace_s}; it must be at least 0 seconds")
        began = time.perf_counter()
        done = {field.name: 0 for field in fields(SyncResult) if field.name != "seconds"}
        referenced: set[str] = set()
        # A killed process may have written a file and not indexed it. A folder that can only be
        # read fails below, if there is anything to write.
        with suppress(StoreError):
            self.engine.store.reconcile()
        # All ids at once: with numbered pages, a deletion meanwhile would hide a record.
        ids = self._records.ids(None)
        desc = f"syncing {self.collection.name}"
        with tqdm(total=len(ids), desc=desc, disable=not progress) as bar:
            for rows in self._records.pages(ids, ["documents", "metadatas"]):
                referenced |= self._sync_page(rows, build_missing, done)
                bar.update(len(rows["ids"]))
        if self._words.exists:
            self._words.rebuild()
        if prune:
            self._prune(referenced, grace_s, done)
        return SyncResult(**done, seconds=time.perf_counter() - began)

    def _sync_page(self, rows: GetResult, build_missing: bool, done: dict[str, int]) -> set[str]:
        """Sync some records and add to the counts in ``done``; returns the keys of their texts."""
        chunks = self.engine.chunks
        documents, metadatas = rows["documents"], rows["metadatas"]
        assert documents is not None and metadatas is not None  # they were asked for
        found = chunks.refer([text or "" for text in documents])
        places = [place for place, ref in enumerate(found) if chunks.fits(ref)]
        fit = [found[place] for place in places]
        looked_up = chunks.look_up(chunks.agree(fit) if build_missing else fit, "exists")
        missed = [ref for ref in looked_up if ref.state == "missed"]
        keys = self._evicted(ref.key for ref in missed)
        evicted = {ref.key: ref for ref in missed if ref.key in keys}
        missed = [ref for ref in missed if ref.key not in evicted]
        if build_missing:
            chunks.compute(missed)
            again = self._with_room([*evicted.values()])
            chunks.compute(again)
            for ref in again:
                del evicted[ref.key]
            done["n_cached"] += len({ref.key for ref in missed}) + len(again)
        key_at = {place: ref.key for place, ref in zip(places, looked_up, strict=True)}
        linked = {
            id_: key_at.get(place)
            for place, (id_, metadata) in enumerate(zip(rows["ids"], metadatas, strict=True))
            if (metadata or {}).get(KEY_FIELD) != key_at.get(place)
        }
        if linked:
            with chroma_errors(f"collection {self.collection.name!r} refused keys"):
                # Chroma merges these into the metadata; None removes the key of a former text.
                self.collection.update(
                    ids=list(linked), metadatas=[{KEY_FIELD: key} for key in linked.values()]
                )
        done["n_records"] += len(documents)
        done["n_linked"] += sum(key is not None for key in linked.values())
        done["n_skipped"] += len(documents) - len(places)
        done["n_evicted"] += len(evicted)
        # A text that is too long for this model may have a cache of another model.
        return {key_at.get(place, ref.key) for place, ref in enumerate(found) if ref.text}

    def _with_room(self, evicted: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Those of some evicted chunks, in order, for which the store has room by now."""
        free = self.engine.store.free_bytes()
        taken = accumulate(self.engine.chunks.n_bytes([ref]) for ref in evicted)
        return [ref for ref, n in zip(evicted, taken, strict=True) if free is None or n <= free]

    def _evicted(self, keys: Iterable[str]) -> set[str]:
        store, fingerprint = self.engine.store, self.engine.fingerprint
        return {key for key in keys if store.is_evicted(key, fingerprint)}

    def _prune(self, referenced: set[str], grace_s: float, done: dict[str, int]) -> None:
        """Delete chunks that are older than the grace and whose text no record has."""
        if not grace_s:
            self.engine.delete(())  # caches that are in memory in case their text is added again
        self._owner.claim()  # raises if another database has claimed the caches
        store, models = self.engine.store, self.engine.store.fingerprints()
        collections = self._records.collections()
        if store.path is not None:
            remove_others(store.path, store.namespace, [str(one.id) for one in collections])
        for collection in collections:
            if collection.id != self.collection.id:
                referenced = referenced | self._keys_of_texts(collection)
        doomed: list[str] = []
        for key in store.known_keys():
            # The cache of another model has another key for the same text.
            if key in referenced or (
                (text := store.text(key)) is not None and self.engine.key_of(text) in referenced
            ):
                continue
            ages = [store.age_s(key, made_by) for made_by in models]
            if any(age_s is not None and age_s < grace_s for age_s in ages):
                done["n_in_grace"] += 1
            else:  # old caches, and texts without a cache
                doomed.append(key)
        bytes_before = store.stats().bytes
        for part in self._records.slices(len(doomed)):
            done["n_pruned"] += self.engine.delete(doomed[part])
        if doomed:  # at least 0: another process may have added more than was deleted
            done["bytes_freed"] = max(0, bytes_before - store.stats().bytes)

    def _keys_of_texts(self, collection: Collection) -> set[str]:
        ids = self._records.read(collection, include=[])["ids"]
        keys: set[str] = set()
        for rows in self._records.pages(ids, ["documents"], of=collection):
            texts = [text for text in rows["documents"] or () if text and normalise(text)]
            keys |= {ref.key for ref in self.engine.chunks.refer(texts)}
        return keys

    # -- questions --------------------------------------------------------------------------

    def search(self, question: str, k: int) -> list[Retrieved]:
        """The ``k`` records that fit a question best, the best first; see `by_question`.

        Raises:
            EmptyInput: the collection is empty.
            InvalidOption: ``k`` is not positive, Chroma cannot be read, or the question's vector
                has another dimension than the records'.
            StoreError: the index of words cannot be used.
            EmbeddingFailed, MissingExtra, ModelNotFound: from the embedding.
        """
        return by_question(self._records, self._words, self.embedding, question, k)

    def query(self, embedding: Sequence[float], k: int) -> list[Retrieved]:
        """The ``k`` records nearest to ``embedding``, nearest first, or all if there are fewer.

        A record without a text is left out, with a warning.

        Raises:
            EmptyInput: the collection is empty.
            InvalidOption: ``k`` is not positive, or the embedding has another length than those in
                the collection.
        """
        return by_vector(self._records, embedding, k)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Records that can be added. refs: the chunk of each; None for one without a cache."""

    ids: Sequence[str]
    texts: Sequence[str]
    embeddings: Sequence[Sequence[float]]
    rows: Sequence[Metadata | None]
    refs: Sequence[ChunkRef | None]

    @property
    def chunks(self) -> list[ChunkRef]:
        return [ref for ref in self.refs if ref]


class Adding:
    """Adds records to a collection in several calls: `check`, `write`, and `finish` at the end.

    Caches of replaced records are released at the end, because their text may have moved to a later
    record. Counts are those of one call with all records.

    build_missing: see `ChromaLink.add`.
    """

    def __init__(self, link: ChromaLink, *, build_missing: bool = True) -> None:
        self._link, self._build_missing = link, build_missing
        self._written = set[str]()  # keys of the records
        self._missed = set[str]()  # those that had no cache before
        self._replaced = set[str]()
        self._n_records = self._n_hit = self._n_bytes = 0
        self._seconds = 0.0

    def check(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        metadatas: Sequence[Metadata | None] | None = None,
        *,
        without_cache: Container[str] = (),
    ) -> Checked:
        """Check records, and look up their caches. Nothing is computed or written.

        Raises as `ChromaLink.add` does.
        """
        began, link, chunks = time.perf_counter(), self._link, self._link.engine.chunks
        rows = link.check(ids, texts, embeddings, metadatas)
        places = [place for place, id_ in enumerate(ids) if id_ not in without_cache]
        named = chunks.agree(chunks.refer([texts[place] for place in places], must_fit=True))
        refs: list[ChunkRef | None] = [None] * len(ids)
        for place, ref in zip(places, named, strict=True):
            is_named = (rows[place] or {}).get(KEY_FIELD) == ref.key
            is_known = is_named or ref.key in self._written or not self._build_missing
            is_trusted = chunks.take_prepared(ref) or is_known
            (refs[place],) = chunks.look_up([ref], "exists" if is_trusted else "whole")
        found = Checked(ids=ids, texts=texts, embeddings=embeddings, rows=rows, refs=refs)
        link._check_release(link._records.keys(ids) - {ref.key for ref in found.chunks})
        self._seconds += time.perf_counter() - began
        return found

    def write(
        self, found: Checked, on_written: Callable[[int], object] = lambda n_tokens: None
    ) -> None:
        """Cache the missed chunks, and write the records.

        on_written: called with a chunk's number of tokens, after its cache is stored.

        Raises as `ChromaLink.add` does. What was written stays.
        """
        began, link, chunks = time.perf_counter(), self._link, self._link.engine.chunks
        missing = [ref for ref in found.chunks if ref.state == "missed"]
        new = [ref for ref in missing if ref.key not in self._missed]
        self._missed |= {ref.key for ref in new}
        n_missing = sum(ref.key in self._missed for ref in found.chunks)
        self._n_records += len(found.ids)
        self._n_hit += len(found.chunks) - n_missing
        # Page by page, so that each cache gets its record within the grace of `sync`.
        for part in link._records.slices(len(found.ids)):
            page = [ref for ref in found.refs[part] if ref and ref.key not in self._written]
            if self._build_missing:
                chunks.compute(page, on_written=on_written)
            self._written |= {ref.key for ref in page}
            ids, texts = found.ids[part], found.texts[part]
            keys = [ref.key if ref else None for ref in found.refs[part]]
            try:
                self._replaced |= link._records.write(
                    ids, texts, found.embeddings[part], found.rows[part], keys
                )
                link._words.put(ids, texts)
            except BaseException:  # records may have been written
                link._words.forget()
                raise
        self._n_bytes += chunks.n_bytes(new) if self._build_missing else 0
        self._seconds += time.perf_counter() - began

    def finish(self) -> IngestResult:
        """Release the caches of replaced records.

        Raises StoreError if one cannot be deleted.
        """
        began = time.perf_counter()
        n_released = self._link._release(self._replaced)
        # If no cache was missing, none was evicted.
        made = self._written if self._build_missing and self._missed else set()
        return IngestResult(
            n_records=self._n_records,
            n_cached=len(self._missed) if self._build_missing else 0,
            n_hit=self._n_hit,
            n_evicted=len(self._link._evicted(made)),
            n_released=n_released,
            seconds=self._seconds + time.perf_counter() - began,
            bytes_on_disk=self._n_bytes,
        )

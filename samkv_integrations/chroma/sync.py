"""Bringing caches into line with the records of a collection, whoever changed those."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from samkv_integrations.cache.chunk import ChunkRef, normalise
from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.owner import Ownership
from samkv_integrations.chroma.records import Records
from samkv_integrations.chroma.results import KEY_FIELD, SyncResult
from samkv_integrations.engine.engine import Engine

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection


class Sync:
    """One run of `ChromaLink.sync`, which says what the arguments mean."""

    def __init__(
        self, records: Records, engine: Engine, owner: Ownership, *, build_missing: bool
    ) -> None:
        self._records = records
        self._engine = engine
        self._owner = owner
        self._build_missing = build_missing
        self._texts: set[bytes] = set()  # what the records say, by digest

    def run(self, *, grace_s: float | None, progress: bool) -> SyncResult:
        """Sync all records; then prune, unless ``grace_s`` is None."""
        began = time.perf_counter()
        done: Counter[str] = Counter()
        referenced: set[str] = set()
        # All ids at once: between two pages by number a deletion would shift a record out of sight.
        ids = self._records.ids(None)
        desc = f"syncing {self._records.collection.name}"
        with tqdm(total=len(ids), desc=desc, disable=not progress) as bar:
            for part in self._records.slices(len(ids)):
                counts, keys = self._page(ids[part])
                done += counts
                referenced |= keys
                bar.update(len(ids[part]))
        if grace_s is not None:
            done += self._prune(referenced, grace_s)
        return SyncResult(
            n_records=done["records"],
            n_cached=done["cached"],
            n_linked=done["linked"],
            n_skipped=done["skipped"],
            n_evicted=done["evicted"],
            n_pruned=done["pruned"],
            n_in_grace=done["in_grace"],
            bytes_freed=done["bytes_freed"],
            seconds=time.perf_counter() - began,
        )

    def _page(self, ids: list[str]) -> tuple[Counter[str], set[str]]:
        """Syncs some records; returns counts and the keys of their texts."""
        rows = self._records.read(
            self._records.collection, ids=ids, include=["documents", "metadatas"]
        )
        documents, metadatas = rows["documents"], rows["metadatas"]
        assert documents is not None and metadatas is not None  # they were asked for
        chunks = self._chunks_of(rows["ids"], documents)
        missed, evicted = self._missed([chunk for chunk in chunks.values() if chunk])
        if self._build_missing:
            self._engine.chunks.compute(missed)
        linked = {
            id_: chunk.key if chunk else None
            for (id_, chunk), metadata in zip(chunks.items(), metadatas, strict=True)
            if (metadata or {}).get(KEY_FIELD) != (chunk.key if chunk else None)
        }
        if linked:
            with chroma_errors(f"collection {self._records.collection.name!r} refused keys"):
                # merged into what else a record has; None takes the key of a former text away
                self._records.collection.update(
                    ids=list(linked),
                    metadatas=[{KEY_FIELD: key} for key in linked.values()],
                )
        counts = Counter(
            records=len(chunks),
            cached=len({chunk.key for chunk in missed}) if self._build_missing else 0,
            linked=sum(key is not None for key in linked.values()),
            skipped=sum(chunk is None for chunk in chunks.values()),
            evicted=len(evicted),
        )
        self._texts |= {_digest(text) for text in documents if text}
        return counts, {chunk.key for chunk in chunks.values() if chunk}

    def _missed(self, chunks: Sequence[ChunkRef]) -> tuple[list[ChunkRef], set[str]]:
        """Those without a cache, and the keys of those whose cache had to make room."""
        store, fingerprint = self._engine.store, self._engine.fingerprint
        missed = [chunk for chunk in chunks if chunk.state == "missed"]
        evicted = {chunk.key for chunk in missed if store.is_evicted(chunk.key, fingerprint)}
        return [chunk for chunk in missed if chunk.key not in evicted], evicted

    def _chunks_of(
        self, ids: Sequence[str], documents: Sequence[str | None]
    ) -> dict[str, ChunkRef | None]:
        """The chunk of each record by id; None of a text that can be no chunk."""
        chunks = self._engine.chunks
        found = chunks.refer([text or "" for text in documents])
        fitting = [place for place, ref in enumerate(found) if chunks.fits(ref)]
        fit = [found[place] for place in fitting]
        if self._build_missing:
            fit = chunks.agree(fit)
        at_place = dict(zip(fitting, chunks.look_up(fit, "exists"), strict=True))
        return {id_: at_place.get(place) for place, id_ in enumerate(ids)}

    def _prune(self, referenced: set[str], grace_s: float) -> Counter[str]:
        """Deletes what is old and neither ``referenced`` nor named by another collection."""
        self._owner.claim()  # another process may have become it since the link was made
        store = self._engine.store
        for collection in self._records.collections():
            if collection.id != self._records.collection.id:
                referenced = referenced | self._keys_of_texts(collection)
        doomed: list[str] = []
        n_in_grace = 0
        models = store.fingerprints()
        for key in store.known_keys():
            if key in referenced or self._has_record(key):
                continue
            ages = [store.age_s(key, made_by) for made_by in models]
            if any(age_s is not None and age_s < grace_s for age_s in ages):
                n_in_grace += 1
            else:  # or there is its text alone
                doomed.append(key)
        bytes_before = store.stats().bytes
        n_pruned = sum(
            self._engine.delete(doomed[part]) for part in self._records.slices(len(doomed))
        )
        # Another process may have added more than was deleted here.
        freed = max(0, bytes_before - store.stats().bytes) if doomed else 0
        return Counter(pruned=n_pruned, in_grace=n_in_grace, bytes_freed=freed)

    def _has_record(self, key: str) -> bool:
        """Whether a record has the text of a chunk, which another model may have made."""
        text = self._engine.store.text(key)
        return text is not None and _digest(text) in self._texts

    def _keys_of_texts(self, collection: Collection) -> set[str]:
        ids, keys = self._records.read(collection, include=[])["ids"], set()
        for part in self._records.slices(len(ids)):
            rows = self._records.read(collection, ids=ids[part], include=["documents"])
            texts = [text for text in rows["documents"] or () if text and normalise(text)]
            keys |= {self._engine.key_of(text) for text in texts}
            self._texts |= {_digest(text) for text in texts}
        return keys


def _digest(text: str) -> bytes:
    """Stands for the body of a text in a few bytes."""
    body = normalise(text).encode(errors="surrogatepass")
    return blake2b(body, digest_size=16).digest()

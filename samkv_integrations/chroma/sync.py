"""Bringing caches into line with the records of a collection, whoever changed those."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
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
        missed = [chunk for chunk in chunks.values() if chunk and chunk.state == "missed"]
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
        )
        return counts, {chunk.key for chunk in chunks.values() if chunk}

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
        """Deletes old caches that neither ``referenced`` nor another collection names."""
        self._owner.claim()  # another process may have become it since the link was made
        store, fingerprint = self._engine.store, self._engine.fingerprint
        for collection in self._records.collections():
            if collection.id != self._records.collection.id:
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
        text = self._engine.store.text(key)
        return text is not None and self._engine.key_of(text) == key

    def _keys_of_texts(self, collection: Collection) -> set[str]:
        ids, keys = self._records.read(collection, include=[])["ids"], set()
        for part in self._records.slices(len(ids)):
            rows = self._records.read(collection, ids=ids[part], include=["documents"])
            texts = (text for text in rows["documents"] or () if text and normalise(text))
            keys |= {self._engine.key_of(text) for text in texts}
        return keys

"""Looking after a store: clearing up, and reading every cache to see whether it is sound."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from samkv_integrations.cache import older
from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.cache.chunk_file import ChunkFile
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.files import remove
from samkv_integrations.cache.recovery import Recovered, reconcile
from samkv_integrations.cache.tables import LOST, PRESENT
from samkv_integrations.errors import CacheMiss, StoreError


@dataclass(frozen=True, kw_only=True)
class GcResult:
    """What `gc` did.

    recovered: what processes had left that were killed. n_forgotten: texts whose cache had gone by
    itself. n_older: caches of older format versions that were deleted. n_damaged: files of the
    quarantine that were deleted. bytes_freed: on disk.
    """

    recovered: Recovered
    n_forgotten: int
    n_older: int
    n_damaged: int
    bytes_freed: int


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A cache that cannot be used: its key, and why, see `CacheMiss`."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What `verify` found. n_bytes: read. n_repaired: damaged caches that were moved away."""

    n_chunks: int
    n_bytes: int
    damaged: tuple[Damage, ...]
    n_repaired: int
    recovered: Recovered


def gc(store: ChunkStore) -> GcResult:
    """Delete what nobody will use: of all namespaces.

    That is what killed processes left, the quarantine, texts whose cache has gone (but not those of
    caches that were evicted), and caches of older format versions. Others may go on working.
    Caches that no record references are `ChromaLink.sync`'s business.

    Raises StoreError if the store cannot be used.
    """
    recovered = reconcile(store.files)
    lost = store.index.places(None, LOST)
    for namespace in {space for *_, space in lost}:
        keys = sorted({key for _, key, space in lost if space == namespace})
        store.index.end_deleting(store.index.begin_to_delete(namespace, keys))
    n_older, older_bytes = 0, 0
    for folder, (_, chunks, n_bytes) in zip(
        older.folders(store.path), older.totals(store.path), strict=True
    ):
        remove(folder)
        n_older, older_bytes = n_older + chunks, older_bytes + n_bytes
    n_damaged, freed = store.files.empty_quarantine(lambda name: True)
    store.index.database.scrub()
    return GcResult(
        recovered=recovered,
        n_forgotten=len(lost),
        n_older=n_older,
        n_damaged=n_damaged,
        bytes_freed=recovered.bytes_freed + older_bytes + freed,
    )


def verify(
    store: ChunkStore, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
) -> VerifyResult:
    """Read every cache of every namespace, and check all its bytes.

    repair: move damaged caches to the quarantine, so that they are computed again when they are
        asked for; else nothing is changed but the index, which is brought into line.
    progress: called with the caches looked at so far, and of how many.

    Raises StoreError if the store cannot be used.
    """
    recovered = reconcile(store.files)
    made_by = {d: Fingerprint(**fields) for d, fields in store.index.fingerprints().items()}
    places = [place for place in store.index.places(None, PRESENT) if place[0] in made_by]
    damaged: list[Damage] = []
    n_bytes = n_repaired = 0
    for number, (digest, key, namespace) in enumerate(places, 1):
        file = store.file(key, digest)
        try:
            with ChunkFile(
                file, key, made_by[digest], namespace=namespace, secret=store.secret
            ) as chunk:
                chunk.verify()
                n_bytes += chunk.bytes_read
        except CacheMiss as miss:
            if miss.reason != "absent":  # deleted or evicted meanwhile
                damaged.append(Damage(key=key, reason=miss.reason, detail=str(miss)))
                if repair and miss.reason != "io":
                    with suppress(OSError, StoreError):
                        store.files.set_aside(file, namespace)
                        n_repaired += 1
        if progress is not None:
            progress(number, len(places))
    return VerifyResult(
        n_chunks=len(places),
        n_bytes=n_bytes,
        damaged=tuple(damaged),
        n_repaired=n_repaired,
        recovered=recovered,
    )

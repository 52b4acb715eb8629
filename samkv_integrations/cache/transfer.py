"""Copying chunk caches between the folder of a store and its remote tier, all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from samkv_integrations.cache.archive import Progress
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.remote import Place
from samkv_integrations.cache.shared import SLICE, SharedTier
from samkv_integrations.cache.tables import PRESENT
from samkv_integrations.errors import InvalidOption, SamkvError, StoreError


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What `push` or `pull` did.

    n_chunks, n_bytes: that were copied. n_left: that could not be, or that there was no room for.
    """

    n_chunks: int
    n_bytes: int
    n_left: int


def push(store: ChunkStore, *, progress: Progress | None = None) -> Moved:
    """Put what the remote tier lacks of the namespace's chunks; one that was emptied begins anew.

    Raises InvalidOption if there is no remote tier, StoreError if it does not answer.
    """
    shared = _shared(store)
    shared.begin_anew()
    here = {(digest, key) for digest, key, _ in store.index.places(store.namespace, PRESENT)}
    return _move(shared, shared.send, sorted(here - shared.listed().chunks.keys()), progress)


def pull(
    store: ChunkStore,
    keys: Collection[str] | None = None,
    *,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Bring chunks of the remote tier into the folder, the newest first, and learn all texts.

    keys: which; None for all. max_bytes: stop before a chunk that would exceed it.
    progress: called with the chunks that are done, and of how many.

    Raises like `push`.
    """
    shared = _shared(store)
    chunks = shared.refresh().chunks
    by_age = sorted(chunks, key=lambda place: -chunks[place].modified_at)
    lacking = [p for p in by_age if shared.lacks(p) and (keys is None or p[1] in keys)]
    wanted, n_bytes = [], 0
    for place in lacking:
        n_bytes += chunks[place].n_bytes
        if max_bytes is not None and n_bytes > max_bytes:
            break
        wanted.append(place)
    done = _move(shared, shared.bring, wanted, progress)
    return replace(done, n_left=done.n_left + len(lacking) - len(wanted))


def _shared(store: ChunkStore) -> SharedTier:
    if store.shared is None:
        raise InvalidOption(
            "the store has no remote tier; open it with remote=, or give --remote or SAMKV_REMOTE"
        )
    return store.shared


def _move(
    shared: SharedTier,
    copy: Callable[[Place], int],
    places: Sequence[Place],
    progress: Progress | None,
) -> Moved:
    def moved(place: Place) -> int | None:
        try:
            return copy(place)
        except (SamkvError, OSError) as error:
            shared.tell(error if isinstance(error, SamkvError) else StoreError(str(error)))
            return None

    sizes: list[int | None] = []
    for begin in range(0, len(places), SLICE):
        for size in shared.remote.objects.pool.map(moved, places[begin : begin + SLICE]):
            sizes.append(size)
            if progress is not None:
                progress(len(sizes), len(places))
    copied = [size for size in sizes if size is not None]
    return Moved(n_chunks=len(copied), n_bytes=sum(copied), n_left=len(sizes) - len(copied))

"""Maintenance of a store: collect garbage, verify, and copy to and from the remote tier."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

from tqdm.auto import tqdm

from samkv_integrations.errors import CacheMiss, InvalidOption, SamkvError, StoreError
from samkv_integrations.store.chunk_file import ChunkFile
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.folder import Recovered, reconcile
from samkv_integrations.store.index import LOST, PRESENT, Place
from samkv_integrations.store.tier import SharedTier


@dataclass(frozen=True, kw_only=True)
class GcResult:
    """The result of `gc`. n_forgotten: texts that had lost their cache. bytes_freed: on disk."""

    recovered: Recovered
    n_forgotten: int
    bytes_freed: int


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A cache that cannot be used: its key, and the reason, see `CacheMiss`."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The result of `verify`. n_bytes: bytes read. n_repaired: deleted caches, all damaged."""

    n_chunks: int
    n_bytes: int
    damaged: tuple[Damage, ...]
    n_repaired: int
    recovered: Recovered


def gc(store: ChunkStore) -> GcResult:
    """Delete garbage in all namespaces, while others may use the store.

    Garbage is: files of processes killed an hour ago or earlier, damaged files, and texts whose
    cache is lost (not those of evicted caches). `ChromaLink.sync` deletes caches without a record.

    Raises StoreError if the store cannot be used.
    """
    recovered = reconcile(store.files)
    lost = store.index.places(None, LOST)
    for namespace in {space for *_, space in lost}:
        keys = [key for _, key, space in lost if space == namespace]
        store.index.delete(namespace, keys, LOST)
    store.index.vacuum()
    return GcResult(recovered=recovered, n_forgotten=len(lost), bytes_freed=recovered.bytes_freed)


def verify(store: ChunkStore, *, repair: bool = False, progress: bool = False) -> VerifyResult:
    """Read every cache of every namespace, and check all its bytes.

    repair: delete damaged caches, which are computed again when a prompt needs them. Without it,
        only the index is changed, to agree with the files.
    progress: whether to show a progress bar on standard error.

    Raises StoreError if the store cannot be used.
    """
    recovered = reconcile(store.files)
    made_by = {each.digest: each for each in store.index.fingerprints()}
    places = [place for place in store.index.places(None, PRESENT) if place[0] in made_by]
    damaged: list[Damage] = []
    n_bytes = n_repaired = 0
    for digest, key, namespace in tqdm(places, "verifying", unit="chunk", disable=not progress):
        try:
            file = store.file(key, digest)
            with ChunkFile(
                file, key, made_by[digest], namespace=namespace, secret=store.secret
            ) as chunk:
                chunk.verify()
                store.index.compare(chunk)
                n_bytes += chunk.bytes_read
        except CacheMiss as miss:
            if miss.reason == "absent":  # deleted or evicted meanwhile
                continue
            damaged.append(Damage(key=key, reason=miss.reason, detail=str(miss)))
            if repair and miss.reason != "io":
                with suppress(StoreError):
                    store.index.lose([(digest, key)], are_damaged=True)
                    n_repaired += 1
    return VerifyResult(
        n_chunks=len(places), n_bytes=n_bytes, damaged=tuple(damaged), n_repaired=n_repaired,
        recovered=recovered,
    )  # fmt: skip


# -- the remote tier ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The result of `push` or `pull`. n_left: chunks that were not copied, or did not fit."""

    n_chunks: int
    n_bytes: int
    n_left: int


def push(store: ChunkStore, *, progress: bool = False) -> Moved:
    """Send the namespace's chunks that the remote tier lacks; all of them if it was emptied.

    Raises InvalidOption if there is no remote tier, StoreError if it does not answer.
    """
    shared = _shared(store)
    shared.check_answers(begins=True)
    there = shared.listed().keys()
    ordinary = {made_by.digest for made_by in store.fingerprints()}
    places = store.index.places(store.namespace, PRESENT)
    here = {(digest, key) for digest, key, _ in places if digest in ordinary}
    return _move(shared, shared.send, sorted(here - there), "pushing", progress)


def pull(store: ChunkStore, *, max_bytes: int | None = None, progress: bool = False) -> Moved:
    """Fetch chunks of the remote tier into the folder, the newest first, and index all of them.

    max_bytes: stop before a chunk that would exceed it.

    Raises like `push`.
    """
    shared = _shared(store)
    chunks = shared.refresh()
    by_age = sorted(chunks, key=lambda place: -chunks[place].modified_at)
    lacking = [place for place in by_age if store.files.is_gone(*place)]
    wanted = lacking
    if max_bytes is not None:
        wanted = lacking[: bisect([*accumulate(chunks[p].n_bytes for p in lacking)], max_bytes)]
    done = _move(shared, shared.bring, wanted, "pulling", progress)
    return replace(done, n_left=done.n_left + len(lacking) - len(wanted))


def _shared(store: ChunkStore) -> SharedTier:
    if store.shared is None:
        raise InvalidOption(
            "the store has no remote tier; open it with remote=, or give --remote or SAMKV_REMOTE"
        )
    return store.shared


def _move(
    shared: SharedTier, copy: Callable[[Place], int], places: Sequence[Place], desc: str,
    progress: bool,
) -> Moved:  # fmt: skip
    def moved(place: Place) -> int | None:
        shared.objects.ask_again()  # one chunk that fails must not stop the others
        try:
            return copy(place)
        except (SamkvError, OSError) as error:
            shared.outage.tell(error)
            return None

    done = shared.objects.pool.map(moved, places)
    bar = tqdm(done, desc, len(places), unit="chunk", disable=not progress)
    copied = [size for size in bar if size is not None]
    return Moved(n_chunks=len(copied), n_bytes=sum(copied), n_left=len(places) - len(copied))

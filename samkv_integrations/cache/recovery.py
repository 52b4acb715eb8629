"""Bringing a store's index into line with its files, after a process that wrote was killed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samkv_integrations.cache.chunk_folder import ChunkFolder
from samkv_integrations.cache.database import is_index
from samkv_integrations.cache.files import (
    TEMPORARY,
    bury,
    cannot,
    dead_writers,
    is_left_behind,
    remove,
)
from samkv_integrations.cache.tables import DELETED, PRESENT
from samkv_integrations.errors import CacheMiss, StoreError

_MAX_EVICTED = 1024
"""More than one put evicts."""

Place = tuple[str, str]
"""Digest of the fingerprint, and key, of a chunk."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What was found out of line.

    n_unfinished: files that were deleted, as their writing or deleting was never finished.
    n_adopted: chunk files that the index did not know.
    n_lost: chunks whose file had gone.
    n_set_aside: files that were no sound chunk files, which are in the quarantine now.
    """

    n_unfinished: int = 0
    n_adopted: int = 0
    n_lost: int = 0
    n_set_aside: int = 0
    bytes_freed: int = 0


def recover(store: ChunkFolder) -> None:
    """Clear up after processes that were killed, if there were any, without listing all files.

    Raises StoreError if the folder or its index cannot be used.
    """
    dead = dead_writers(store.path)
    try:
        _finish_deleting(store)
        if dead:
            store.index.database.clear_up()
            names = os.listdir(store.path)
            _delete_unfinished(store, dead, [store.path / n for n in names if _is_temporary(n)])
            # What a put evicts goes while its transaction is open: a kill leaves it in the index.
            store.index.lose(store.index.least_used(_MAX_EVICTED), store.is_gone)
            bury(store.path, dead)
    except OSError as error:
        raise cannot("clear up in", store.path, error) from error


def reconcile(store: ChunkFolder) -> Recovered:
    """Finish what dead writers began, and believe the files in all else: looks at every name.

    Others may read and write meanwhile. Raises like `recover`.
    """
    try:
        store.require_own()
        dead = dead_writers(store.path)
        store.index.database.clear_up()
        n_unfinished = _finish_deleting(store)
        files, temporary = _listed(store)
        n_left, bytes_freed = _delete_unfinished(store, dead, temporary)
        known = {(digest, key) for digest, key, _ in store.index.places(None, PRESENT)}
        gone = [place for place in known - files.keys() if store.is_gone(*place)]
        if gone:
            store.index.lose(gone, store.is_gone)
        strangers = [_adopt(store, files[place]) for place in sorted(files.keys() - known)]
        bury(store.path, dead)
    except OSError as error:
        raise cannot("look through", store.path, error) from error
    return Recovered(
        n_unfinished=n_left + n_unfinished,
        n_adopted=strangers.count("adopted"),
        n_lost=len(gone),
        n_set_aside=strangers.count("set aside"),
        bytes_freed=bytes_freed,
    )


def _finish_deleting(store: ChunkFolder) -> int:
    """Delete the files of chunks whose texts have gone already; how many."""
    places = [(digest, key) for digest, key, _ in store.index.places(None, DELETED)]
    for digest, key in places:
        with suppress(CacheMiss):
            remove(store.file(key, digest))
    if places:
        store.index.end_deleting(places, store.is_gone)
    return len(places)


def _delete_unfinished(
    store: ChunkFolder, dead: Sequence[str], temporary: Iterable[Path]
) -> tuple[int, int]:
    """Delete what dead writers were writing; how many files there were, and their bytes.

    temporary: files to look at besides those that the index knows to be written.
    """
    left = {file for file in temporary if is_left_behind(store.path, file, dead)}
    finished: list[Path] = []
    names: list[str] = []
    for name, digest, key in store.index.budget.pending():
        with suppress(CacheMiss):
            file = store.file(key, digest)
            if is_left_behind(store.path, file.with_name(name), dead):
                names.append(name)
                left.add(file.with_name(name))
                finished.append(file)
    left = {file for file in left if os.path.lexists(file)}
    bytes_freed = sum(remove(file) for file in left)
    for file in finished:  # written, and killed before the index was told
        _adopt(store, file)
    for name in names:
        store.index.budget.release(name)
    return len(left), bytes_freed


def _listed(store: ChunkFolder) -> tuple[dict[Place, Path], list[Path]]:
    """The files of chunks, by place, and all temporary files of the store."""
    files: dict[Place, Path] = {}
    temporary = [store.path / n for n in os.listdir(store.path) if _is_temporary(n)]
    for digest in store.digests():
        for file in store.files(digest):
            if file.name.endswith(TEMPORARY):
                temporary.append(file)
            elif file.suffix == ".safetensors":
                files[digest, file.stem] = file
    return files, temporary


def _is_temporary(name: str) -> bool:
    """Whether a file of this name is being written; an index is, under a lock of its own."""
    return name.endswith(TEMPORARY) and not is_index(name)


def _adopt(store: ChunkFolder, file: Path) -> str:
    """Tell the index of a file that it does not know; what became of it."""
    try:
        entry = store.entry(file)
    except CacheMiss as miss:
        if miss.reason in ("absent", "io"):  # deleted meanwhile, or not readable at the moment
            return miss.reason
        with suppress(OSError, StoreError):
            store.set_aside(file, "")
        return "set aside"
    except OSError:
        return "absent"
    # another process may have put it since the files were listed
    if store.index.state(entry.digest, entry.key) != PRESENT:
        store.index.keep(entry, is_gone=store.is_gone)
        return "adopted"
    return "known"

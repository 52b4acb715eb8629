"""Bringing a store's index into line with its files, after a process that wrote was killed."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from samkv_integrations.cache.disk import ChunkStore

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


def recover(store: ChunkStore) -> None:
    """Clear up after processes that were killed, if there were any. Cheap if not.

    Raises StoreError if the folder or its index cannot be used.
    """
    if dead_writers(store.path) or store.index.places(None, DELETED):
        reconcile(store)


def reconcile(store: ChunkStore) -> Recovered:
    """Finish what dead writers began, and believe the files in all else.

    Others may read and write meanwhile. Raises like `recover`.
    """
    try:
        dead = dead_writers(store.path)
        store.index.database.clear_up()
        recovered = _reconciled(store, dead)
        bury(store.path, dead)
    except OSError as error:
        raise cannot("look through", store.path, error) from error
    return recovered


def _reconciled(store: ChunkStore, dead: list[str]) -> Recovered:
    unfinished = [(digest, key) for digest, key, _ in store.index.places(None, DELETED)]
    for digest, key in unfinished:
        with suppress(CacheMiss):
            remove(store.file(key, digest))
    if unfinished:
        store.index.end_deleting(unfinished)
    files, temporary = _listed(store)
    left = [file for file in temporary if is_left_behind(store.path, file, dead)]
    bytes_freed = sum(remove(file) for file in left)
    for name, *_ in store.index.budget.pending():
        if is_left_behind(store.path, store.path / name, dead):
            store.index.budget.release(name)
    known = {(digest, key) for digest, key, _ in store.index.places(None, PRESENT)}
    gone = [place for place in known - files.keys() if store.is_gone(*place)]
    if gone:
        store.index.lose(gone, store.is_gone)
    strangers = [_adopt(store, files[place]) for place in sorted(files.keys() - known)]
    return Recovered(
        n_unfinished=len(left) + len(unfinished),
        n_adopted=strangers.count("adopted"),
        n_lost=len(gone),
        n_set_aside=strangers.count("set aside"),
        bytes_freed=bytes_freed,
    )


def _listed(store: ChunkStore) -> tuple[dict[Place, Path], list[Path]]:
    """The files of chunks, by place, and all temporary files of the store."""
    files: dict[Place, Path] = {}
    temporary = [store.path / n for n in os.listdir(store.path) if n.endswith(TEMPORARY)]
    for digest in store.digests():
        for file in store.files(digest):
            if file.name.endswith(TEMPORARY):
                temporary.append(file)
            elif file.suffix == ".safetensors":
                files[digest, file.stem] = file
    return files, [file for file in temporary if not is_index(file.name)]


def _adopt(store: ChunkStore, file: Path) -> str:
    """Tell the index of a file that it does not know; what became of it."""
    try:
        entry = store.entry(file)
    except CacheMiss as miss:
        if miss.reason in ("absent", "io"):  # deleted meanwhile, or not readable at the moment
            return miss.reason
        with suppress(OSError, StoreError):
            store.set_aside(file)
        return "set aside"
    except OSError:
        return "absent"
    # another process may have put it since the files were listed
    if store.index.state(entry.digest, entry.key) != PRESENT:
        store.index.keep(entry)
        return "adopted"
    return "known"

"""Reading chunk caches ahead, so that the first questions find them in the page cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from samkv_integrations.cache.checked_file import open_regular
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.tables import PRESENT

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WarmResult:
    """What `warm` read. n_left: caches that were not read, because ``max_bytes`` was reached."""

    n_chunks: int
    bytes_read: int
    n_left: int


def warm(
    store: ChunkStore,
    keys: Collection[str] | None = None,
    *,
    max_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WarmResult:
    """Read the files of a namespace's caches, those used last first, and keep nothing of them.

    The operating system keeps what it has memory for. No model is needed, nothing is verified, and
    no cache counts as used.

    keys: which; None for all. max_bytes: stop before a file that would exceed it.
    progress: called with the chunks that are done, and of how many.

    Raises StoreError if the store cannot be used.
    """
    places = [
        (digest, key)
        for digest, key, _ in store.index.places(store.namespace, PRESENT)
        if keys is None or key in keys
    ]
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    n_chunks = n_bytes = 0
    for number, (digest, key) in enumerate(places, 1):
        try:
            with open_regular(store.file(key, digest)) as file:
                size = os.fstat(file.fileno()).st_size
                if max_bytes is not None and n_bytes + size > max_bytes:
                    return WarmResult(
                        n_chunks=n_chunks, bytes_read=n_bytes, n_left=len(places) - number + 1
                    )
                while got := file.readinto(buffer):
                    n_bytes += got
                n_chunks += 1
        except OSError:  # deleted or evicted meanwhile, or damaged: a question will say
            pass
        if progress is not None:
            progress(number, len(places))
    return WarmResult(n_chunks=n_chunks, bytes_read=n_bytes, n_left=0)

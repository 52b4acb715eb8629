"""The page cache, and how fast the files of a store can be read at all."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from samkv_integrations.errors import InvalidOption
from samkv_integrations.store.disk import ChunkStore

_BLOCK_BYTES = 1 << 20


def require_cold() -> None:
    """Raise InvalidOption if this platform cannot drop files from its page cache."""
    if not hasattr(os, "posix_fadvise"):
        raise InvalidOption(
            "page_cache='cold': this platform has no posix_fadvise, which drops files from the "
            "page cache; give 'warm', or measure on Linux"
        )


def chunk_files(store: ChunkStore) -> list[Path]:
    """The files that hold chunk caches, their texts left out."""
    return sorted(store.path.rglob("*.safetensors"))


def drop(files: Sequence[Path]) -> None:
    """Drop ``files`` from the page cache, so that the next to read them waits for the disk.

    What is not written yet could not be dropped, hence the fsync. A file system in memory (tmpfs)
    has nothing behind it and drops nothing.
    """
    require_cold()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_bytes_per_s(files: Sequence[Path], *, cold: bool, repeats: int) -> float | None:
    """Bytes per second of reading ``files`` one after the other, whole, in blocks of 1 MiB.

    The median of ``repeats``, with one more before them unless ``cold``, which drops the files each
    time. None without files.
    """
    rates = []
    for _ in range(repeats + (not cold)):
        if cold:
            drop(files)
        began = time.perf_counter()
        n_bytes = sum(map(_read, files))
        rates.append(n_bytes / (time.perf_counter() - began))
    return statistics.median(rates[-repeats:]) if any(rates) else None


def _read(file: Path) -> int:
    """Bytes of ``file``, all of which are read into one buffer."""
    block, n_bytes = bytearray(_BLOCK_BYTES), 0
    with file.open("rb", buffering=0) as opened:
        while got := opened.readinto(block):
            n_bytes += got
    return n_bytes

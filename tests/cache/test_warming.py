"""Reading caches ahead."""

from __future__ import annotations

import os
from pathlib import Path

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.upkeep import warm
from tests.contracts.store_contract import TINY, chunk_for


def filled(path: Path, n: int = 4) -> tuple[ChunkStore, list[str]]:
    store = ChunkStore(path / "kv")
    chunks = [chunk_for(store, seed) for seed in range(n)]
    for chunk in chunks:
        store.put(chunk)
    ChunkStore(path / "kv", namespace="tenant").put(chunk_for(ChunkStore(path / "kv"), 9))
    return store, [chunk.key for chunk in chunks]


def test_what_was_used_last_is_read_first(tmp_path: Path) -> None:
    store, keys = filled(tmp_path)
    store.record(TINY, used=[keys[1]])
    size = store.file(keys[1], TINY.digest).stat().st_size
    os.unlink(store.file(keys[1], TINY.digest))
    assert warm(store, max_bytes=size).n_chunks == 1  # it has gone, and the next one is read
    assert warm(store, max_bytes=2 * size + 1).n_left == 1
    assert warm(store, max_bytes=1) == warm(store, max_bytes=1).__class__(
        n_chunks=0, bytes_read=0, n_left=3
    )


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    store, keys = filled(tmp_path)
    for key, make in zip(
        keys, (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)), strict=False
    ):
        path = store.file(key, TINY.digest)
        path.unlink()
        make(path)
    assert warm(store).n_chunks == 1

"""Files of single chunks, outside of any store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.runtimes.transformers.entries.cache_arrays import cache_shape
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import ChunkCache
from samkv_integrations.store.chunk_file import ChunkFile, encode

SECRET = bytes(range(100, 132))
NAMESPACE = 'Müller "& co"'


def encoded(chunk: ChunkCache, namespace: str = NAMESPACE, secret: bytes = SECRET) -> bytes:
    return b"".join(encode(chunk, namespace, secret))


def open_file(path: Path, chunk: ChunkCache) -> ChunkFile:
    return ChunkFile(path, chunk.key, chunk.fingerprint, namespace=NAMESPACE, secret=SECRET)


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file, by default of its last byte, which is an entry's."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def read_all(stored: StoredChunk) -> NDArray[np.uint8]:
    """(L, T, E): the entries of all layers."""
    entries = np.empty(cache_shape(stored.fingerprint, stored.n_tokens).entries, np.uint8)
    stored.read_layers(0, list(entries))
    return entries

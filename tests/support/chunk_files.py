"""Files of single chunks, outside of any store."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from samkv_integrations.chunks.chunk import ChunkCache
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk_file import ChunkFile, encode

SECRET = bytes(range(100, 132))
NAMESPACE = 'Müller "& co"'


def encoded(chunk: ChunkCache, namespace: str = NAMESPACE, secret: bytes = SECRET) -> bytes:
    return b"".join(encode(chunk, namespace, secret))


def open_file(path: Path, chunk: ChunkCache) -> ChunkFile:
    return ChunkFile(path, chunk.key, chunk.fingerprint, namespace=NAMESPACE, secret=SECRET)


def read_all(stored: StoredChunk) -> Tensor:
    """(L, T, E): the entries of all layers."""
    form, n_layers = stored.fingerprint.entry_format, stored.fingerprint.n_layers
    entries = torch.empty(n_layers, stored.n_tokens, form.n_bytes, dtype=torch.uint8)
    stored.read_layers(0, list(entries))
    return entries

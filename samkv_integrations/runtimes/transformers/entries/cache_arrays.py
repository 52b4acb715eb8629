"""The arrays of a chunk cache: entries, and all else that this runtime stores, as tensors.

A store keeps bytes with a dtype's name and a shape. docs/format.md has the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat
from samkv_integrations.store.chunk import (
    ArrayKind,
    CacheArray,
    CacheShape,
    ChunkCache,
    ChunkRef,
    Fingerprint,
)

_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkStatistics:
    """What a chunk's attention to itself says about its blocks (paper: Appendix A).

    block_max: (L,) int32, most important middle block; -1 for a chunk without middle blocks.
    block_min: (L,) int32, least important middle block; -1 for a chunk without middle blocks.
    outliers: (L, T) bool, middle tokens whose alpha is below the layer's mean by 3 sigma.
    stable: (L,) bool, layers in which the chunk's leading block stands out (Appendix A.2).
    """

    block_max: Tensor
    block_min: Tensor
    outliers: Tensor
    stable: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMeans:
    """Mean un-rotated key of each of the Nm middle blocks, in 8 bits.

    codes: (L, Nm, G, D) int8; scale: (L, Nm, G) float16; mean = codes * scale. Anchor blocks
    need no means, because their tokens are always loaded.
    """

    codes: Tensor
    scale: Tensor


class HasArrays(Protocol):
    """A `ChunkCache`, or an opened `StoredChunk`, which may raise `CacheMiss`."""

    def array(self, name: str) -> CacheArray:
        """An array by its name."""


# -- formats --------------------------------------------------------------------------------------


def dtype_of(fingerprint: Fingerprint) -> torch.dtype:
    """The model's dtype."""
    dtype = getattr(torch, fingerprint.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@lru_cache(maxsize=16)
def entry_format_of(fingerprint: Fingerprint) -> EntryFormat:
    """The format of the entries of a fingerprint's caches."""
    return EntryFormat(
        bits=fingerprint.store_bits, n_kv_heads=fingerprint.n_kv_heads,
        head_dim=fingerprint.head_dim, dtype=dtype_of(fingerprint),
    )  # fmt: skip


def cache_shape(fingerprint: Fingerprint, n_tokens: int) -> CacheShape:
    """The arrays of the cache of a chunk of ``n_tokens`` tokens."""
    n_layers, n_groups, dim = fingerprint.n_layers, fingerprint.n_kv_heads, fingerprint.head_dim
    n_middle = len(fingerprint.scheme.of(n_tokens).middle_blocks)
    form = entry_format_of(fingerprint)

    def kind(dtype: torch.dtype, *shape: int) -> ArrayKind:
        return ArrayKind(dtype=_NAMES[dtype], shape=(n_layers, *shape))

    return CacheShape(
        at_opening={
            "block_max": kind(torch.int32),
            "block_min": kind(torch.int32),
            "stable": kind(torch.uint8),
            "outliers": kind(torch.uint8, n_tokens),
        },
        on_demand={
            "local_query": kind(dtype_of(fingerprint), fingerprint.n_heads, dim),
            "summary_codes": kind(torch.int8, n_middle, n_groups, dim),
            "summary_scale": kind(torch.float16, n_middle, n_groups),
            "key_range": kind(torch.float16, *form.range_shape(n_tokens)),
        },
        entries=(n_layers, n_tokens, form.n_bytes),
    )


# -- from arrays to tensors, and back -------------------------------------------------------------


def to_tensor(array: CacheArray) -> Tensor:
    """A tensor that shares the array's memory."""
    dtype, shape = _DTYPES[array.kind.dtype], array.kind.shape
    if not array.kind.n_bytes:  # torch cannot view an empty tensor as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(array.data).view(dtype).view(shape)


def to_array(tensor: Tensor) -> CacheArray:
    """An array of a CPU tensor, whose memory it shares if that is contiguous; bool becomes U8."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    kind = ArrayKind(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))
    return CacheArray(kind=kind, data=tensor.detach().reshape(-1).view(torch.uint8).numpy())


def statistics(stored: HasArrays) -> ChunkStatistics:
    """The attention statistics of a cache."""
    block_max, block_min, outliers, stable = (
        to_tensor(stored.array(name)) for name in ("block_max", "block_min", "outliers", "stable")
    )
    return ChunkStatistics(
        block_max=block_max, block_min=block_min,
        outliers=outliers.view(torch.bool), stable=stable.view(torch.bool),
    )  # fmt: skip


def local_query(stored: HasArrays) -> Tensor:
    """(L, H, D) in the model's dtype, mean un-rotated query of the local blocks' tokens."""
    return to_tensor(stored.array("local_query"))


def block_means(stored: HasArrays) -> BlockMeans:
    """The mean key of each middle block."""
    codes, scale = (to_tensor(stored.array(f"summary_{side}")) for side in ("codes", "scale"))
    return BlockMeans(codes=codes, scale=scale)


def key_range(stored: HasArrays) -> Tensor:
    """(L, N, 2, G, D) float16, scale and offset of each key channel in N groups of tokens.

    See `EntryFormat`; N is 0 with 16 bits.
    """
    return to_tensor(stored.array("key_range"))


def cache_of(
    chunk: ChunkRef, fingerprint: Fingerprint, *,
    entries: Tensor, key_range: Tensor, local_query: Tensor, statistics: ChunkStatistics,
    block_means: BlockMeans,
) -> ChunkCache:  # fmt: skip
    """The cache of a chunk, made of CPU tensors, whose memory it shares.

    entries: (L, T, E) uint8. All other arguments have the shapes that the functions of these names
    return.
    """
    first = {
        "block_max": statistics.block_max, "block_min": statistics.block_min,
        "stable": statistics.stable, "outliers": statistics.outliers,
    }  # fmt: skip
    later = {
        "local_query": local_query, "summary_codes": block_means.codes,
        "summary_scale": block_means.scale, "key_range": key_range,
    }  # fmt: skip
    return ChunkCache(
        key=chunk.key, fingerprint=fingerprint, text=chunk.text,
        token_ids=np.array(chunk.token_ids, np.int32),
        at_opening={name: to_array(tensor) for name, tensor in first.items()},
        on_demand={name: to_array(tensor) for name, tensor in later.items()},
        entries=entries.detach().numpy(),
    )  # fmt: skip

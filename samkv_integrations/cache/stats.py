"""What a store holds, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FingerprintStats:
    """What a store holds of one fingerprint; ``bytes`` counts chunk files, texts left out.

    Chunks of an older ``format_version`` take room and are of no use any more.
    """

    model: str
    dtype: str
    store_bits: int
    block_size: int
    format_version: int
    chunks: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds, in all and of each fingerprint."""

    n_chunks: int
    bytes: int
    rows: tuple[FingerprintStats, ...]


def _stats(known: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, list[int]]) -> StoreStats:
    """Sums of the sizes of chunk files, by fingerprint digest; ``known`` has its fields."""
    rows = tuple(
        FingerprintStats(
            model=fields["model"],
            dtype=fields["dtype"],
            # Version 1 had no choice: it kept the model's own dtype, as 16 bits do.
            store_bits=fields.get("store_bits", 16),
            block_size=fields["block_size"],
            format_version=fields["format_version"],
            chunks=len(sizes[digest]),
            bytes=sum(sizes[digest]),
        )
        for digest, fields in known.items()
        if fields and sizes.get(digest)
    )
    everything = [size for of_one in sizes.values() for size in of_one]
    return StoreStats(n_chunks=len(everything), bytes=sum(everything), rows=rows)

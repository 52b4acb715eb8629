"""What a store holds, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Counts = tuple[int, int, int, int]
"""Hits, misses, evictions and damaged caches."""


@dataclass(frozen=True, kw_only=True)
class FingerprintStats:
    """What a store holds of one fingerprint and namespace; ``bytes`` counts chunk files.

    hits, misses: chunks of prompts that were answered from a cache, and that had none.
    evicted: caches that went for want of room. corrupt: damaged ones that were found.

    Chunks of an older ``format_version`` take room and are of no use any more; they are listed
    without a namespace.
    """

    model: str
    dtype: str
    store_bits: int
    block_size: int
    format_version: int
    chunks: int
    bytes: int
    namespace: str = ""
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    corrupt: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the chunks of prompts that were answered from a cache; None before any."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds, in all and by fingerprint and namespace.

    max_bytes: what the chunk files of all namespaces may take; None for no limit.
    """

    n_chunks: int
    bytes: int
    rows: tuple[FingerprintStats, ...]
    max_bytes: int | None = None


def _stats(
    known: Mapping[str, Mapping[str, Any]],
    totals: Sequence[tuple[str, str, int, int]],
    counts: Mapping[tuple[str, str], Counts] | None = None,
    *,
    older: Sequence[tuple[Mapping[str, Any], int, int]] = (),
    max_bytes: int | None = None,
) -> StoreStats:
    """Figures of the totals (namespace, digest, chunks, bytes) of chunk files.

    known: the fields of fingerprints, by digest.
    older: (fields, chunks, bytes) of fingerprints of older format versions.
    """
    counts = counts or {}
    rows = [
        _row(known[digest], chunks, n_bytes, namespace, counts.get((namespace, digest), (0,) * 4))
        for namespace, digest, chunks, n_bytes in totals
        if chunks and digest in known
    ]
    rows += [
        _row(fields, chunks, n_bytes) for fields, chunks, n_bytes in older if fields and chunks
    ]
    sums = [total[2:] for total in totals] + [total[1:] for total in older]
    return StoreStats(
        n_chunks=sum(chunks for chunks, _ in sums),
        bytes=sum(n_bytes for _, n_bytes in sums),
        rows=tuple(rows),
        max_bytes=max_bytes,
    )


def _row(
    fields: Mapping[str, Any],
    chunks: int,
    n_bytes: int,
    namespace: str = "",
    counts: Counts = (0, 0, 0, 0),
) -> FingerprintStats:
    hits, misses, evicted, corrupt = counts
    return FingerprintStats(
        model=fields["model"],
        dtype=fields["dtype"],
        # Version 1 had no choice: it kept the model's own dtype, as 16 bits do.
        store_bits=fields.get("store_bits", 16),
        block_size=fields["block_size"],
        format_version=fields["format_version"],
        chunks=chunks,
        bytes=n_bytes,
        namespace=namespace,
        hits=hits,
        misses=misses,
        evicted=evicted,
        corrupt=corrupt,
    )

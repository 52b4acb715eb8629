"""The KV entries of chunks as the store keeps them: 16, 8 or 4 bits a number, in NumPy.

With 16 bits an entry is a row of K and a row of V, as llama.cpp has computed them. With fewer, keys
are stored without their rotation, after a Hadamard transform (QuaRot, arXiv 2404.00456), per
channel over groups of tokens; values per token and head (KIVI, arXiv 2402.02750, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import InvalidChunk
from samkv_integrations.option import STORE_BITS, among
from samkv_integrations.runtimes.llama_cpp.library.positions import Rotation

GROUP_TOKENS = 64
"""Tokens whose keys share scale and offset per channel."""

PART_BYTES = 1_000_000
"""Bytes of keys in float32 that are unpacked at once, so that they stay in the processor's cache.

Four chunks of SmolLM2, 1,000 tokens, take 24 ms, and 31 ms with all layers at once.
"""

ONE_THREAD = 2**18
"""Most multiplications of a product of matrices that OpenBLAS does not share out to threads."""

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class EntryCodec:
    """The entry of one token at one layer, E bytes.

    With 16 bits: keys (G, Dk) and values (G, Dv), float16. Else: codes of the keys, codes of the
    values, then scale and offset of the values, (G,) float16 each. With 4 bits a byte holds a
    number of the first half of the keys, or values, and one of the second half in its upper bits.

    bits: of a number. n_heads: G, heads of keys and values. k_dim, v_dim: numbers of a head.
    halves: rounds numbers to F16.

    Raises InvalidOption if ``bits`` is not one of `STORE_BITS`.
    """

    bits: int
    n_heads: int
    k_dim: int
    v_dim: int
    halves: Callable[[Floats], Halves] = partial(np.asarray, dtype=np.float16)

    def __post_init__(self) -> None:
        among(*STORE_BITS)("store_bits", self.bits)

    @property
    def is_quantised(self) -> bool:
        return self.bits < 16

    @cached_property
    def n_bytes(self) -> int:
        """E, the bytes of an entry."""
        codes = self.n_heads * (self.k_dim + self.v_dim) * self.bits // 8
        return codes + (4 * self.n_heads if self.is_quantised else 0)

    def range_shape(self, n_tokens: int) -> tuple[int, int, int, int]:
        """Shape of the key range of a layer: (N, 2, G, Dk); N is 0 with 16 bits."""
        n_groups = -(-n_tokens // GROUP_TOKENS) if self.is_quantised else 0
        return n_groups, 2, self.n_heads, self.k_dim

    # -- to the store -------------------------------------------------------------------------

    def encode(
        self, keys: Bytes, values: Bytes, rotation: Rotation, positions: NDArray[np.int64]
    ) -> tuple[Bytes, Halves]:
        """Entries (L, T, E) and key ranges (L, N, 2, G, Dk) of rows of K and V.

        keys, values: (L, T, bytes) rows of F16. positions: (T,) for which keys are rotated.

        Raises InvalidChunk if a number is not finite.
        """
        n_layers, n_tokens = keys.shape[:2]
        if not self.is_quantised:
            sides = [np.ascontiguousarray(side) for side in (keys, values)]
            if not all(np.isfinite(side.view(np.float16)).all() for side in sides):
                raise _not_finite()
            no_range = np.empty((n_layers, *self.range_shape(0)), np.float16)
            return np.concatenate(sides, axis=2), no_range
        wide_keys = self._floats(keys, self.k_dim)
        rotation.rotate(wide_keys, -positions)
        wide_keys = _transformed(wide_keys)
        wide_values = self._floats(values, self.v_dim)
        if not (np.isfinite(wide_keys).all() and np.isfinite(wide_values).all()):
            raise _not_finite()
        starts = np.arange(0, n_tokens, GROUP_TOKENS)
        key_range = self._range(
            np.minimum.reduceat(wide_keys, starts, axis=1),
            np.maximum.reduceat(wide_keys, starts, axis=1), axis=2,
        )  # fmt: skip
        group = np.arange(n_tokens) // GROUP_TOKENS
        scale, offset = key_range.astype(np.float32)[:, group].transpose(2, 0, 1, 3, 4)
        of_keys = self._packed((wide_keys - offset) / scale)
        value_range = self._range(wide_values.min(-1), wide_values.max(-1), axis=2)
        scale, offset = value_range.astype(np.float32).transpose(2, 0, 1, 3)[..., None]
        of_values = self._packed((wide_values - offset) / scale)
        of_tokens = value_range.reshape(n_layers, n_tokens, -1).view(np.uint8)
        return np.concatenate((of_keys, of_values, of_tokens), axis=2), key_range

    def _floats(self, rows: Bytes, dim: int) -> Floats:
        halves = np.ascontiguousarray(rows).view(np.float16)
        return halves.reshape(*rows.shape[:2], self.n_heads, dim).astype(np.float32)

    def _range(self, least: Floats, most: Floats, axis: int) -> Halves:
        """Scale and offset, rounded, so that codes from 0 on reach from ``least`` to ``most``."""
        scale = np.maximum((most - least) / (2**self.bits - 1), 2.0**-24)
        return np.stack((scale, least), axis).astype(np.float16)

    def _packed(self, numbers: Floats) -> Bytes:
        """(L, T, G, D) numbers in units of a code -> (L, T, bytes)."""
        codes = np.rint(numbers).clip(0, 2**self.bits - 1).astype(np.uint8)
        codes = codes.reshape(*codes.shape[:2], -1)
        if self.bits == 4:
            first, second = np.split(codes, 2, axis=2)
            codes = first | np.left_shift(second, 4)
        return codes

    # -- from the store -----------------------------------------------------------------------

    def decode(
        self, entries: Bytes, key_range: Halves, rotation: Rotation, offsets: NDArray[np.int64],
        cached_at: NDArray[np.int64], positions: NDArray[np.int64], keys: Bytes, values: Bytes,
    ) -> None:  # fmt: skip
        """Fill rows of K and V with the entries of some tokens of a chunk.

        entries: (L, T, E) of the whole chunk. key_range: (L, N, 2, G, Dk). offsets: (S,) indices of
        the tokens in the chunk. cached_at, positions: (S,) for which keys were rotated when they
        were cached, and for which they are rotated now. keys, values: (L, S, bytes), filled.
        """
        of_layer = 4 * len(offsets) * self.n_heads * max(self.k_dim, self.v_dim)
        size = max(1, PART_BYTES // of_layer)
        for start in range(0, len(entries), size):
            part = slice(start, start + size)
            self._decode(
                entries[part], key_range[part], rotation, offsets, cached_at, positions,
                keys[part], values[part],
            )  # fmt: skip

    def _decode(
        self, entries: Bytes, key_range: Halves, rotation: Rotation, offsets: NDArray[np.int64],
        cached_at: NDArray[np.int64], positions: NDArray[np.int64], keys: Bytes, values: Bytes,
    ) -> None:  # fmt: skip
        """As `decode`, for layers whose numbers stay in the processor's cache meanwhile."""
        chosen = entries[:, offsets] if len(offsets) < entries.shape[1] else entries
        split = self.n_heads * self.k_dim * self.bits // 8
        if not self.is_quantised:
            values[...] = chosen[..., split:]
            if np.array_equal(cached_at, positions):  # exact, to the last bit
                keys[...] = chosen[..., :split]
                return
            wide = self._floats(chosen[..., :split], self.k_dim)
            rotation.rotate(wide, positions - cached_at)
        else:
            end = split + self.n_heads * self.v_dim * self.bits // 8
            scale, offset = key_range.astype(np.float32)[:, offsets // GROUP_TOKENS].transpose(
                2, 0, 1, 3, 4
            )
            wide = self._unpacked(chosen[..., :split], self.k_dim)
            wide *= scale
            wide += offset
            wide = _transformed(wide)
            rotation.rotate(wide, positions)
            ranges = np.ascontiguousarray(chosen[..., end:]).view(np.float16).astype(np.float32)
            of_values = self._unpacked(chosen[..., split:end], self.v_dim)
            of_values *= ranges[..., : self.n_heads, None]
            of_values += ranges[..., self.n_heads :, None]
            values[...] = self._rows(of_values)
        keys[...] = self._rows(wide)

    def _unpacked(self, codes: Bytes, dim: int) -> Floats:
        shape = (*codes.shape[:2], self.n_heads, dim)
        if self.bits == 8:
            return codes.astype(np.float32).reshape(shape)
        return np.concatenate((codes & 15, codes >> 4), axis=2).astype(np.float32).reshape(shape)

    def _rows(self, wide: Floats) -> Bytes:
        """(L, T, G, D) -> (L, T, bytes) of F16."""
        return self.halves(wide).reshape(*wide.shape[:2], -1).view(np.uint8)


def _transformed(keys: Floats) -> Floats:
    """Keys (..., D) after the transform of each head, in products that run on one thread.

    After a product on several threads, those of OpenBLAS spin for 100 ms, on the cores that
    llama.cpp needs next.
    """
    dim = keys.shape[-1]
    rows, size = keys.reshape(-1, dim), max(1, ONE_THREAD // dim**2)
    found, end = np.empty_like(rows), len(rows) // size * size
    parts = (rows[:end].reshape(-1, size, dim), found[:end].reshape(-1, size, dim))
    np.matmul(parts[0], _hadamard(dim), out=parts[1])
    np.matmul(rows[end:], _hadamard(dim), out=found[end:])
    return found.reshape(keys.shape)


@cache
def _hadamard(dim: int) -> Floats:
    """(dim, dim) the orthogonal transform of a head, which is its own inverse.

    Blocks of the largest power of two that divides ``dim`` are transformed.
    """
    size, block = dim & -dim, np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size)).astype(np.float32)


def _not_finite() -> InvalidChunk:
    return InvalidChunk(
        "llama.cpp computed keys or values that are not finite numbers for this chunk; leave it "
        "out, or give another file of the model"
    )

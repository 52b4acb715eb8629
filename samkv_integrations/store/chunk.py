"""A chunk, its blocks, its cache, and the fingerprint of the model that computed the cache."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import Given, InvalidOption

FORMAT_VERSION = 5
SECRET_BYTES = 32
MAX_NAMESPACE = 1000


@dataclass(frozen=True, kw_only=True)
class BlockScheme:
    """How chunks are cut into blocks (paper: section 4.1, one initial and two local blocks).

    size: tokens in a block (the last block of a chunk may be shorter).
    n_init, n_local: blocks at the beginning and end of a chunk; their tokens are anchor tokens.
    """

    size: int = 16
    n_init: int = 1
    n_local: int = 2

    def __post_init__(self) -> None:
        if type(self.size) is not int:
            raise InvalidOption(
                Given("block_size", self.size), "; it must be a whole number, or 'auto'"
            )
        if self.size < 1 or self.n_init < 0 or self.n_local < 0:
            raise InvalidOption(
                f"block scheme {self}: size must be at least 1, n_init and n_local at least 0"
            )

    @classmethod
    def auto(cls, chunk_tokens: int) -> BlockScheme:
        """The power of two from 8 to 64 with which anchors are about a tenth of a chunk.

        With the paper's 64, anchors would be 37.5 % of a chunk of 512 tokens.
        """
        size = 8
        while size < 64 and 3 * 2 * size <= 0.15 * chunk_tokens:
            size *= 2
        return cls(size=size)

    def of(self, n_tokens: int) -> ChunkBlocks:
        """The blocks of a chunk of ``n_tokens`` tokens."""
        return ChunkBlocks(n_tokens=n_tokens, scheme=self)


@dataclass(frozen=True, kw_only=True)
class ChunkBlocks:
    """The blocks of one chunk.

    The tokens of its `middle_blocks` are its middle, all others are its anchor tokens. A
    chunk of at most ``n_init + n_local`` blocks has no middle.
    """

    n_tokens: int
    scheme: BlockScheme

    @cached_property
    def n_blocks(self) -> int:
        return -(-self.n_tokens // self.scheme.size)

    @cached_property
    def middle_blocks(self) -> range:
        """Indices of the middle blocks."""
        n_init, n_local = self.scheme.n_init, self.scheme.n_local
        if self.n_blocks <= n_init + n_local:
            return range(self.n_blocks, self.n_blocks)
        return range(n_init, self.n_blocks - n_local)

    @cached_property
    def local_start(self) -> int:
        """First token of the local blocks: the last ``n_local``, fewer in a short chunk."""
        return max(0, self.n_blocks - self.scheme.n_local) * self.scheme.size

    def span(self, block: int) -> tuple[int, int]:
        """First token of ``block`` and the one after its last."""
        size = self.scheme.size
        return block * size, min((block + 1) * size, self.n_tokens)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) tokens in each block."""
        lengths = np.full(self.n_blocks, self.scheme.size, np.int64)
        lengths[-1] = self.n_tokens - (self.n_blocks - 1) * self.scheme.size
        return lengths

    @cached_property
    def is_anchor(self) -> NDArray[np.bool_]:
        """(N,) bool: the blocks that are not in the middle."""
        index, middle = np.arange(self.n_blocks), self.middle_blocks
        return (index < middle.start) | (index >= middle.stop)


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything that a chunk cache depends on, besides its tokens.

    Two engines share caches exactly when their fingerprints are equal. Fields are strings and
    numbers, so an error can name those that differ.
    """

    model: str
    weights: str
    config: str
    tokenizer: str
    dtype: str
    rope: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    prefix: str
    block_size: int
    n_init: int
    n_local: int
    store_bits: int
    format_version: int = FORMAT_VERSION

    @property
    def runtime(self) -> str:
        """What computed the caches, a name out of `RUNTIMES`."""
        return "llama_cpp" if self.config == "llama.cpp" else "transformers"

    @cached_property
    def computed_by(self) -> str:
        """Identifies what computed keys and values from tokens: weights, config and RoPE."""
        return f"{self.weights}{self.config}{self.rope}"

    @cached_property
    def scheme(self) -> BlockScheme:
        return BlockScheme(size=self.block_size, n_init=self.n_init, n_local=self.n_local)

    @cached_property
    def digest(self) -> str:
        """32 hex digits that name this fingerprint on disk.

        ``model`` is only a label, and not part of it: ``weights`` is a hash of the weights.
        """
        named = {name: value for name, value in asdict(self).items() if name != "model"}
        canonical = json.dumps(named, sort_keys=True).encode()
        return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def normalise(text: str) -> str:
    """The body of a chunk, which is what is cached: its text without surrounding white space."""
    return text.strip()


def check_namespace(namespace: str) -> str:
    """The namespace. Raises InvalidOption if it is too long, or cannot be written as UTF-8."""
    if not isinstance(namespace, str) or len(namespace) > MAX_NAMESPACE:
        raise InvalidOption(
            Given("namespace", namespace),
            f"; it must be a string of at most {MAX_NAMESPACE} characters",
        )
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(
            Given("namespace", namespace),
            " holds a lone surrogate; it must be text that can be written as UTF-8",
        ) from error
    return namespace


def check_keys(keys: Iterable[object]) -> None:
    """Raises InvalidOption if one of ``keys`` cannot be a key in any store."""
    for key in keys:
        if not isinstance(key, str) or any("\ud800" <= each <= "\udfff" for each in key):
            raise InvalidOption(
                Given("key", key), "; it must be a string, as `keys` of a store gives"
            )


def chunk_key(secret: bytes, namespace: str, fingerprint: str, token_ids: Sequence[int]) -> str:
    """The key of a chunk cache, 32 hex digits: a hash keyed with the store's secret.

    Without the secret nobody can compute the key of a text.
    """
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in (namespace.encode(), fingerprint.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(array("i", token_ids).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChunkRef:
    """A chunk: its key, body and token ids, and whether it has a cache.

    state: ``cached``, or ``missed`` if there was no usable cache when it was looked up.
    """

    key: str
    text: str
    token_ids: tuple[int, ...]
    state: Literal["cached", "missed"] = "missed"


NUMBER_BYTES: Mapping[str, int] = {
    "U8": 1, "I8": 1, "I32": 4, "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip
"""Bytes of a number of each dtype that an array may have, by its name in safetensors."""


class ArrayKind(NamedTuple):
    """Dtype, one of `NUMBER_BYTES`, and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * NUMBER_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheArray:
    """One array of a cache. A store keeps its bytes; a runtime knows what the numbers mean.

    data: (kind.n_bytes,) uint8, of little-endian numbers, row-major.
    """

    kind: ArrayKind
    data: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The arrays of a cache, without their content. The runtime that computes caches defines them.

    at_opening: by name, arrays that are read when a cache is opened. on_demand: arrays that are
    read on request. No name is in both.
    entries: (L, T, E), see `ChunkCache`.
    """

    at_opening: Mapping[str, ArrayKind]
    on_demand: Mapping[str, ArrayKind]
    entries: tuple[int, int, int]

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays and entries."""
        arrays = (*self.at_opening.values(), *self.on_demand.values())
        return prod(self.entries) + sum(kind.n_bytes for kind in arrays)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkCache:
    """The cache of one chunk, in memory and on the CPU.

    token_ids: (T,) int32.
    at_opening, on_demand: arrays by name, see `CacheShape`.
    entries: (L, T, E) uint8, the KV entries of T tokens at L layers, E bytes each.
    """

    key: str
    fingerprint: Fingerprint
    text: str
    token_ids: NDArray[np.int32]
    at_opening: Mapping[str, CacheArray]
    on_demand: Mapping[str, CacheArray]
    entries: NDArray[np.uint8]

    def array(self, name: str) -> CacheArray:
        """An array by its name."""
        found = self.at_opening.get(name)
        return self.on_demand[name] if found is None else found

    @cached_property
    def shape(self) -> CacheShape:
        n_layers, n_tokens, n_bytes = self.entries.shape
        return CacheShape(
            at_opening={name: array.kind for name, array in self.at_opening.items()},
            on_demand={name: array.kind for name, array in self.on_demand.items()},
            entries=(n_layers, n_tokens, n_bytes),
        )

    @cached_property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @cached_property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)

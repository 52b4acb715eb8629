"""A chunk, its blocks, its cache, and the fingerprint of the model that computed the cache."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat

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

    The tokens before and behind its `middle_blocks` are its anchor tokens, the others its middle. A
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
    def lengths(self) -> Tensor:
        """(N,) tokens in each block."""
        lengths = torch.full((self.n_blocks,), self.scheme.size)
        lengths[-1] = self.n_tokens - (self.n_blocks - 1) * self.scheme.size
        return lengths

    @cached_property
    def is_anchor(self) -> Tensor:
        """(N,) bool: the blocks that are not in the middle."""
        index, middle = torch.arange(self.n_blocks), self.middle_blocks
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

    @cached_property
    def computed_by(self) -> str:
        """Identifies what computed keys and values from tokens: weights, config and RoPE."""
        return f"{self.weights}{self.config}{self.rope}"

    @cached_property
    def scheme(self) -> BlockScheme:
        return BlockScheme(size=self.block_size, n_init=self.n_init, n_local=self.n_local)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @cached_property
    def entry_format(self) -> EntryFormat:
        return EntryFormat(
            bits=self.store_bits, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim,
            dtype=self.torch_dtype,
        )  # fmt: skip

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
        raise InvalidOption(Given("namespace", namespace), " holds a lone surrogate") from error
    return namespace


def check_keys(keys: Iterable[object]) -> None:
    """Raises InvalidOption for what cannot be a key in any store."""
    for key in keys:
        if not isinstance(key, str) or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise InvalidOption(
                Given("key", key), "; it must be a string, as `keys` of a store gives"
            )


def chunk_key(secret: bytes, namespace: str, fingerprint: str, token_ids: Sequence[int]) -> str:
    """The key of a chunk cache, 32 hex digits: a hash keyed with the store's secret.

    Without the secret nobody can tell the key of a text.
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


@dataclass(frozen=True, kw_only=True)
class ChunkStatistics:
    """What a chunk's attention to itself says about its blocks (paper: Appendix A).

    block_max: (L,) int32, middle block of the highest importance, -1 without a middle.
    block_min: (L,) int32, middle block of the highest unimportance, -1 without a middle.
    outliers: (L, T) bool, middle tokens whose alpha is below the layer's mean by 3 sigma.
    stable: (L,) bool, layers in which the chunk's leading block stands out (Appendix A.2).
    """

    block_max: Tensor
    block_min: Tensor
    outliers: Tensor
    stable: Tensor


@dataclass(frozen=True, kw_only=True)
class BlockMeans:
    """Mean un-rotated key of each of the Nm middle blocks, in 8 bits.

    codes: (L, Nm, G, D) int8; scale: (L, Nm, G) float16; mean = codes * scale. Anchor blocks need
    none, because their tokens are always loaded.
    """

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkCache:
    """The cache of one chunk, in memory and on the CPU.

    token_ids: (T,) int32.
    entries: (L, T, E) uint8, KV entries in the layout of `EntryFormat`, keys un-rotated.
    key_range: (L, N, 2, G, D) float16, scale and offset of each key channel in each of N groups of
        tokens, see `EntryFormat`; N is 0 with 16 bits.
    local_query: (L, H, D) in the model's dtype, mean un-rotated query of the local blocks' tokens.
    """

    key: str
    fingerprint: Fingerprint
    text: str
    token_ids: Tensor
    entries: Tensor
    key_range: Tensor
    local_query: Tensor
    statistics: ChunkStatistics
    block_means: BlockMeans

    @cached_property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @cached_property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)

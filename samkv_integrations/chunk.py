"""What a cached chunk is, what it is called, and what computed it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from samkv_integrations.layout import BlockScheme, ChunkBlocks
from samkv_integrations.quantise import EntryFormat

FORMAT_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of everything that a chunk cache depends on besides its tokens.

    Two engines share caches exactly when their fingerprints are equal. Every field is a plain
    string or number, so a store can say which field differs.
    """

    model: str
    weights: str
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

        ``model`` is a label for people and not part of it: the weights' own digest decides.
        """
        return digest_of(asdict(self))


def digest_of(fields: Mapping[str, object]) -> str:
    """The digest of a fingerprint with these fields, which may be those of another release."""
    named = {name: value for name, value in fields.items() if name != "model"}
    canonical = json.dumps(named, sort_keys=True).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def normalise(text: str) -> str:
    """The body of a chunk: its text without surrounding white space. The unit of caching."""
    return text.strip()


_ESCAPES = ("\\n", "\\r", "\\t")  # as `repr` writes them: the letter belongs to the backslash


def is_in_word(text: str, at: int) -> bool:
    """Whether the characters around place ``at`` belong to one word."""
    if not 0 < at < len(text) or text[at - 2 : at] in _ESCAPES:
        return False
    return text[at - 1].isalnum() and text[at].isalnum()


def chunk_key(secret: bytes, namespace: str, fingerprint: str, token_ids: Sequence[int]) -> str:
    """32 hex digits naming a chunk cache: a hash of what it holds, keyed with the store's secret.

    Without the secret a key cannot be guessed from a text, so a handle typed into a prompt by
    someone who never saw the store names nothing.
    """
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in (namespace.encode(), fingerprint.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(torch.tensor(list(token_ids), dtype=torch.int32).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChunkStatistics:
    """What the attention of a chunk on itself says about its blocks (paper: Appendix A).

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
class Summaries:
    """Mean un-rotated key of each middle block (Nm of them), in 8 bits per block and head.

    codes: (L, Nm, G, D) int8; scale: (L, Nm, G) float16; mean = codes * scale. Those of anchor
    blocks are not kept: whoever scores anchors has their rows.
    """

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkCache:
    """Everything kept for one chunk, whole and in memory (on the CPU).

    token_ids: (T,) int32.
    entries: (L, T, E) uint8, the KV entries as `EntryFormat` lays them out, keys un-rotated.
    key_range: (L, N, 2, G, D) float16, scale and offset of each channel of the keys of N groups of
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
    summaries: Summaries

    @property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)

"""One chunk cache: what is kept of a chunk, and its key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samkv_integrations.cache.blocks import ChunkBlocks
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.errors import InvalidOption


def normalise(text: str) -> str:
    """The body of a chunk: its text without surrounding white space. The unit of caching."""
    return text.strip()


def check_namespace(namespace: str) -> str:
    """The namespace. Raises InvalidOption if it is none: each file of a chunk holds its name."""
    if not isinstance(namespace, str) or len(namespace) > MAX_NAMESPACE:
        raise InvalidOption(
            f"namespace={namespace!r:.60}; it must be a string of at most {MAX_NAMESPACE} "
            "characters"
        )
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(f"namespace={namespace!r:.60} holds half a character") from error
    return namespace


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
class ChunkRef:
    """A chunk by name: its key, body and token ids, and whether there is a cache of it.

    state: ``cached``, or ``missed``: there was none that could be used when it was looked at.
    """

    key: str
    text: str
    token_ids: tuple[int, ...]
    state: Literal["cached", "missed"] = "missed"


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
class BlockMeans:
    """Mean un-rotated key of each middle block (Nm of them), in 8 bits per block and head.

    codes: (L, Nm, G, D) int8; scale: (L, Nm, G) float16; mean = codes * scale. Those of anchor
    blocks are not kept: whoever scores anchors has their tokens.
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
    block_means: BlockMeans

    @property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)


SECRET_BYTES = 32
MAX_NAMESPACE = 1000

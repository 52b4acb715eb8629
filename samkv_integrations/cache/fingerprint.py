"""The identity of what computed a chunk cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch

from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.cache.quantise import EntryFormat
from samkv_integrations.errors import FingerprintMismatch

FORMAT_VERSION = 4


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of everything that a chunk cache depends on besides its tokens.

    Two engines share caches exactly when their fingerprints are equal. Every field is a plain
    string or number, so a store can say which field differs.
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
    def computed_by(self) -> str:
        """Names what turned tokens into keys and values: weights, config and RoPE."""
        return f"{self.weights}{self.config}{self.rope}"

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


# Those that an engine takes from the store, beside the one that it is given.
_LAYOUT_FIELDS = ("block_size", "store_bits")


def _without_block_size(fingerprint: Fingerprint) -> str:
    """Names everything about a fingerprint but the block size."""
    return replace(fingerprint, block_size=1).digest


def _require(wanted: Fingerprint, held: Sequence[Fingerprint], where: str) -> None:
    if not held or wanted.digest in {fingerprint.digest for fingerprint in held}:
        return
    mine = asdict(wanted)
    differing = [
        {name: value for name, value in asdict(other).items() if value != mine[name]}
        for other in held
    ]
    closest = min(range(len(held)), key=lambda i: len(differing[i]))
    fields = ", ".join(
        f"{name} is {mine[name]!r:.40} here and {value!r:.40} there"
        for name, value in differing[closest].items()
    )
    next_step = (
        "ingest again with the loaded model, or open the store with the one it was filled with"
    )
    there = differing[closest]
    if "store_bits" in there and there.keys() <= {*_LAYOUT_FIELDS}:
        next_step = f"give store_bits={there['store_bits']}, or ingest again"
    elif "dtype" in there and held[closest].model == wanted.model:  # other weights, by their hash
        next_step = f"give dtype={there['dtype']!r}, or ingest again"
    elif there.keys() <= {"prefix", *_LAYOUT_FIELDS}:
        next_step = (
            "give the prefix= and prefix_text= of the engine that filled it, or ingest again"
        )
    raise FingerprintMismatch(
        f"{where} holds no cache of the loaded model {wanted.model!r}; the closest it holds is of "
        f"{held[closest].model!r}: {fields}; next step: {next_step}"
    )

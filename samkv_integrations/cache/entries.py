"""KV entries of some context tokens at one layer, in the bytes that they are stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.cache.quantise import EntryFormat, groups
from samkv_integrations.cache.rope import unrotate

_TILE = 1 << 18
"""Numbers of keys, which with what they are computed from fill a few MB (docs/decisions.md)."""


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Entries of n tokens, and where their keys sit.

    codes: (n, E) uint8, see `EntryFormat`. key_range: (N, 2, G, D) float16, of some groups. group:
    (n,) which of them is each token's.
    cos, sin: (Tctx, G, D / 2) float32, contiguous, of the positions of all context tokens, as the
    model rotates them. tokens: (n,) which of those these are, None for all.
    """

    form: EntryFormat
    codes: Tensor
    key_range: Tensor
    group: Tensor
    cos: Tensor
    sin: Tensor
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def n_bytes(self) -> int:
        """Bytes of what is stored."""
        return self.codes.nbytes + self.key_range.nbytes

    def keys(self) -> Tensor:
        """(n, G, D) at their positions, in the model's dtype."""
        return self._rotated(slice(None)).to(self.form.dtype)

    def logits(self, query: Tensor) -> Tensor:
        """(G, H / G, n) float32 products of a query (H, D) with all keys, which are not rounded.

        Sooner than `keys` and a product: a CPU computes as many keys at once as its cache holds.
        """
        grouped = query.float().view(self.form.n_kv_heads, -1, self.form.head_dim)
        logits = grouped.new_empty(*grouped.shape[:2], len(self))
        size = max(1, _TILE // grouped[:, 0].numel()) if self.codes.is_cpu else len(self)
        for first in range(0, len(self), size):
            part = slice(first, first + size)
            logits[..., part] = grouped @ self._rotated(part).permute(1, 2, 0)
        return logits

    def _rotated(self, part: slice) -> Tensor:
        """(m, G, D) float32 keys of some places, at their positions."""
        if self.tokens is None:
            cos, sin = self.cos[part], self.sin[part]
        else:
            at = self.tokens[part]
            cos, sin = self.cos.index_select(0, at), self.sin.index_select(0, at)
        return self.form.rotated_keys(self.codes[part], self.key_range, self.group[part], cos, sin)

    def values(self) -> Tensor:
        """(n, G, D) in the model's dtype."""
        return self.form.values(self.codes)

    def select(self, at: Tensor) -> Entries:
        """Those of places (k,)."""
        # index_select copies whole places, several times sooner than an index does
        return replace(
            self,
            codes=self.codes.index_select(0, at),
            group=self.group.index_select(0, at),
            tokens=at if self.tokens is None else self.tokens.index_select(0, at),
        )

    def with_computed(self, at: Tensor, keys: Tensor, values: Tensor) -> Entries:
        """With other keys, at their positions, and values (k, G, D) at places (k,).

        They are quantised here, in groups of their own: the ranges of those that they were in may
        not hold them.
        """
        if not len(at):
            return self
        tokens = at if self.tokens is None else self.tokens[at]
        cos, sin = (
            torch.cat((side, side), -1) for side in (self.cos[tokens, 0], self.sin[tokens, 0])
        )
        unrotated = unrotate(keys.float(), cos, sin).to(self.form.dtype)
        codes, key_range = self.form.encode_computed(unrotated, values)
        group = len(self.key_range) + groups(len(at), at.device)
        return replace(
            self,
            codes=self.codes.index_copy(0, at, codes),
            key_range=torch.cat((self.key_range, key_range)),
            group=self.group.index_copy(0, at, group),
        )

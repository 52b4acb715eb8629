"""How a chunk is cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption


@dataclass(frozen=True, kw_only=True)
class BlockScheme:
    """How chunks are cut into blocks (paper: section 4.1, one initial and two local blocks).

    size: tokens in a block (the last block of a chunk may be shorter).
    n_init, n_local: blocks at the beginning and end of a chunk whose tokens are its anchor tokens.
    """

    size: int = 16
    n_init: int = 1
    n_local: int = 2

    def __post_init__(self) -> None:
        if type(self.size) is not int:
            raise InvalidOption(f"block_size={self.size!r}; it must be a whole number, or 'auto'")
        if self.size < 1 or self.n_init < 0 or self.n_local < 0:
            raise InvalidOption(
                f"block scheme {self}: size must be at least 1, n_init and n_local at least 0"
            )

    @classmethod
    def auto(cls, chunk_tokens: int) -> BlockScheme:
        """The power of two from 8 to 64 that keeps the anchors at about a tenth of a chunk.

        B must follow the chunk length: with the paper's 64 a 512-token chunk would keep 37.5 %
        before any selection.
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

    Tokens ``[0, middle_start)`` and ``[middle_stop, n_tokens)`` are its anchor tokens, those
    between are its middle. A chunk of at most ``n_init + n_local`` blocks is all anchors.
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
    def middle_start(self) -> int:
        return min(self.middle_blocks.start * self.scheme.size, self.n_tokens)

    @cached_property
    def middle_stop(self) -> int:
        return min(self.middle_blocks.stop * self.scheme.size, self.n_tokens)

    @property
    def n_middle(self) -> int:
        """Tokens of the middle."""
        return self.middle_stop - self.middle_start

    @property
    def n_anchor(self) -> int:
        """Anchor tokens."""
        return self.n_tokens - self.n_middle

    @cached_property
    def local_start(self) -> int:
        """First token of the local blocks (the last ``n_local``, fewer in a short chunk)."""
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
    def block_of_token(self) -> Tensor:
        """(T,) index of the block that holds each token."""
        return torch.arange(self.n_tokens) // self.scheme.size

    @cached_property
    def is_anchor(self) -> Tensor:
        """(N,) bool: initial and local blocks, which is all that are not in the middle."""
        index, middle = torch.arange(self.n_blocks), self.middle_blocks
        return (index < middle.start) | (index >= middle.stop)

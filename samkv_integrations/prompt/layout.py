"""Where tokens sit: the positions of every segment of a request.

Shapes, one legend for the whole package: L layers, H query heads, G key-value heads, D head dim,
T tokens, S kept tokens, B block size, N blocks, C chunks in a request, R computed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from samkv_integrations.cache.blocks import ChunkBlocks


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One stretch of a prompt, tokenised on its own.

    blocks: the block structure, for a chunk whose cache is at hand; None for anything that is
    computed from its tokens.
    is_context: whether the tokens are a chunk's (with or without a usable cache).
    computed_now: whether the chunk's cache was made for this very prompt.
    """

    token_ids: tuple[int, ...]
    blocks: ChunkBlocks | None = None
    is_context: bool = False
    computed_now: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of every token of a request, and the blocks of its cached chunks.

    Cached chunks in prompt order form the *context*: its tokens (Tctx of them) and blocks (Nb) are
    numbered through. All tensors live on the CPU.

    token_ids: (T,) the logical prompt, prefix included.
    uncached: (T,) bool, tokens that are always computed. The last token always is: it gives the
        logits.
    context_positions: (Tctx,) position of each context token.
    block_of_token: (Tctx,) block of each context token.
    block_lengths, block_chunk: (Nb,) tokens in each block, and the chunk it belongs to.
    is_anchor: (Nb,) bool, initial and local blocks.
    exact: (C,) bool, chunks that begin right after the prefix that they were prefilled with, so
        that their cache already equals full prefill.
    question: (W,) positions of the last plain segment's tokens; the last token alone if the prompt
        does not end with such a segment.
    n_missed: tokens of chunks that had no usable cache.
    """

    token_ids: Tensor
    uncached: Tensor
    context_positions: Tensor
    block_of_token: Tensor
    block_lengths: Tensor
    block_chunk: Tensor
    is_anchor: Tensor
    exact: Tensor
    question: Tensor
    chunk_starts: tuple[int, ...]
    chunk_blocks: tuple[ChunkBlocks, ...]
    n_missed: int
    n_prefix: int

    @classmethod
    def of(cls, segments: Sequence[Segment], prefix: tuple[int, ...]) -> Layout:
        """Lay ``segments`` end to end. ``prefix`` is what chunks were prefilled after."""
        ids: list[int] = []
        uncached: list[Tensor] = []
        starts: list[int] = []
        blocks: list[ChunkBlocks] = []
        question = torch.empty(0, dtype=torch.long)
        for segment in segments:
            start, length = len(ids), len(segment.token_ids)
            if segment.blocks is not None:
                assert segment.blocks.n_tokens == length
                starts.append(start)
                blocks.append(segment.blocks)
            elif length and not segment.is_context:
                question = torch.arange(start, start + length)
            uncached.append(torch.full((length,), segment.blocks is None))
            ids.extend(segment.token_ids)
        is_uncached = torch.cat(uncached)
        is_uncached[-1] = True
        if not len(question) or int(question[-1]) != len(ids) - 1:
            question = torch.tensor([len(ids) - 1])
        lengths = [b.lengths for b in blocks]
        first_block = [0]
        for chunk in blocks:
            first_block.append(first_block[-1] + chunk.n_blocks)
        empty = torch.empty(0, dtype=torch.long)
        return cls(
            token_ids=torch.tensor(ids),
            uncached=is_uncached,
            context_positions=_cat(
                [torch.arange(s, s + b.n_tokens) for s, b in zip(starts, blocks, strict=True)],
                empty,
            ),
            block_of_token=_cat(
                [f + b.block_of_token for f, b in zip(first_block, blocks, strict=False)], empty
            ),
            block_lengths=_cat(lengths, empty),
            block_chunk=_cat([torch.full((b.n_blocks,), c) for c, b in enumerate(blocks)], empty),
            is_anchor=_cat([chunk.is_anchor for chunk in blocks], empty.bool()),
            exact=torch.tensor(
                [s == len(prefix) and tuple(ids[:s]) == prefix for s in starts], dtype=torch.bool
            ),
            question=question,
            chunk_starts=tuple(starts),
            chunk_blocks=tuple(blocks),
            n_missed=sum(len(s.token_ids) for s in segments if s.is_context and s.blocks is None),
            n_prefix=len(prefix),
        )

    def as_text(self) -> Layout:
        """The same prompt without any chunk."""
        return Layout.of([Segment(token_ids=tuple(self.token_ids.tolist()))], ())

    @property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def n_context(self) -> int:
        """Context tokens with a cache (Tctx)."""
        return int(self.context_positions.shape[0])

    @property
    def n_blocks(self) -> int:
        return int(self.block_lengths.shape[0])

    @property
    def n_chunks(self) -> int:
        return len(self.chunk_blocks)

    @cached_property
    def chunk_of_token(self) -> Tensor:
        """(Tctx,) chunk of each context token."""
        return self.block_chunk[self.block_of_token]

    @cached_property
    def offset_in_chunk(self) -> Tensor:
        """(Tctx,) index of each context token within its chunk."""
        return (
            self.context_positions
            - torch.tensor(self.chunk_starts, dtype=torch.long)[self.chunk_of_token]
        )

    def place_in_chunks(self, device: torch.device) -> Tensor:
        """(Tctx,) place of each context token in a table of chunks by offsets, row after row.

        The table is as wide as the longest chunk. Moved to ``device`` once, as each move waits.
        """
        if device not in self._moved:
            place = self.chunk_of_token * self.longest_chunk + self.offset_in_chunk
            self._moved[device] = place.to(device)
        return self._moved[device]

    @cached_property
    def longest_chunk(self) -> int:
        """Tokens of it."""
        return max(blocks.n_tokens for blocks in self.chunk_blocks)

    @cached_property
    def _moved(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def prefilled_positions(self) -> Tensor:
        """(Tctx,) position at which each context token was prefilled."""
        return self.offset_in_chunk + self.n_prefix

    @cached_property
    def middle_of_chunk(self) -> Tensor:
        """(C, Nb) bool: the middle blocks of each chunk."""
        chunk = torch.arange(self.n_chunks)[:, None]
        return (self.block_chunk == chunk) & ~self.is_anchor

    @cached_property
    def first_block(self) -> Tensor:
        """(C,) index of each chunk's first block."""
        counts = torch.tensor([b.n_blocks for b in self.chunk_blocks], dtype=torch.long)
        return counts.cumsum(0) - counts


def _cat(parts: list[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(parts) if parts else empty

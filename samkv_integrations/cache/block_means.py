"""The mean un-rotated key of each middle block of a chunk, in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from samkv_integrations.cache.blocks import ChunkBlocks
from samkv_integrations.cache.chunk import BlockMeans
from samkv_integrations.cache.quantise import HALF_STEP, as_half


def quantise_means(keys: Tensor, blocks: ChunkBlocks) -> BlockMeans:
    """Mean un-rotated key (of L, T, G, D) of each middle block, int8 per layer, block and head.

    A mean beyond 127 * 65504 would be clamped; real keys are far below.
    """
    assert keys.shape[1] == blocks.n_tokens
    means = mean_of_blocks(keys, blocks.lengths)[:, list(blocks.middle_blocks)]
    scale = _scale(means.abs().amax(-1) / 127)
    codes = (means / scale.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return BlockMeans(codes=codes, scale=scale)


def mean_of_blocks(entries: Tensor, lengths: Tensor) -> Tensor:
    """(L, N, G, D) float32 mean of entries (L, T, G, D) over blocks of ``lengths`` (N,) tokens."""
    n_layers, _, *shape = entries.shape
    block = torch.arange(len(lengths)).repeat_interleave(lengths).to(entries.device)
    total = torch.zeros(n_layers, len(lengths), *shape, device=entries.device)
    counts = lengths.clamp(min=1).to(entries.device)  # of no tokens: 0
    return total.index_add_(1, block, entries.float()) / counts[:, None, None]


def decode_means(block_means: BlockMeans) -> Tensor:
    """(L, Nm, G, D) float32 mean un-rotated key of each middle block."""
    return block_means.codes.float() * block_means.scale.float()[..., None]


def _scale(step: Tensor) -> Tensor:
    """A float16 scale for a ``step`` of at least 0, never 0 itself.

    Rounding a normal float16 down costs the outermost code at most 255 * 2^-11 of a step, which is
    less than the half that it is off anyway; a subnormal one could fall short by more.
    """
    return as_half(step + HALF_STEP)

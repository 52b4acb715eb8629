"""Blocks of a GGUF file as codes with a scale and an offset.

A few operations of torch read the common types, in several threads, twice as fast as the gguf
package. The values have the same bits as those that the gguf package computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes (n, columns), and scale and offset (n, columns / group): values are scale * code + offset.

Codes of types without an offset are signed.
"""


def parts_of(kind: Any, blocks: Tensor) -> Parts | None:  # noqa: ANN401
    """The parts of rows of blocks (n, bytes); None for a type that the gguf package must read.

    The layouts of the blocks are those of ggml-quants.c.
    """
    if (read := _READERS.get(kind.name)) is None:
        return None
    from gguf import GGML_QUANT_SIZES

    codes, scale, offset = read(blocks.view(-1, GGML_QUANT_SIZES[kind][1]))
    n = len(blocks)
    return (
        codes.reshape(n, -1),
        scale.reshape(n, -1),
        None if offset is None else offset.reshape(n, -1),
    )


def values_of(parts: Parts) -> Tensor:
    """(n, columns) float32."""
    codes, scale, offset = parts
    groups = codes.view(*scale.shape, -1) * scale[..., None]
    return (groups if offset is None else groups.add_(offset[..., None])).view(codes.shape)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return codes.view(torch.int8) - zero


def _float(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(halves: Tensor, size: int) -> Tensor:
    """Numbers of 4 bits: ``size`` low halves of bytes, then their high halves."""
    halves = halves.reshape(len(halves), -1, size)
    return torch.cat((halves & 15, halves >> 4), -1).flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return _signed(_nibbles(blocks[:, 2:], 16), 8), _float(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _float(blocks, 0), _float(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    fifth = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    codes = _nibbles(blocks[:, 6:], 16) | fifth.flatten(1) << 4
    return _signed(codes, 16), _float(blocks, 0), None


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _float(blocks, 0), None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of 8 groups of 32 numbers: 6 bits each, times a float of the block."""
    from gguf.quants import Q4_K

    scale, offset = (torch.from_numpy(x) for x in Q4_K.get_scale_min(blocks[:, 4:16].numpy()))
    return _float(blocks, 0) * scale, -_float(blocks, 2) * offset


def _q4_k(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _nibbles(blocks[:, 48:], 32) | fifth.flatten(1) << 4, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    codes = _nibbles(blocks[:, :128], 64) | high.flatten(1) << 4
    scale = _float(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return _signed(codes, 32), scale, None


_READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip

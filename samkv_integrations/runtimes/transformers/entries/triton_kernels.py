"""Triton kernels that decode 4-bit entries to keys and values on a CUDA device, and encode them.

`Entries.write` and `EntryFormat.encode_chunks` do the same in some twenty and fifty operations,
each of which reads and writes all numbers in float32. The module is imported only if there is a
CUDA device.
"""

from __future__ import annotations

import torch
import triton  # comes with torch's CUDA builds
import triton.language as tl
from torch import Tensor

_BLOCK = 32
"""Entries of one head that one program decodes."""


@triton.jit  # type: ignore[untyped-decorator]
def _write_entries(  # type: ignore[no-untyped-def]  # noqa: ANN202
    codes, rows, group, tokens, key_range, cos, sin, hadamard, keys, values, n,  # noqa: ANN001
    of_entry, of_head,  # noqa: ANN001
    n_bytes: tl.constexpr, n_heads: tl.constexpr, half: tl.constexpr, has_rows: tl.constexpr,
    has_tokens: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_there, channel = at < n, tl.arange(0, half)
    both = is_there[:, None] & (channel[None] < half)
    at = tl.where(is_there, at, 0).to(tl.int64)
    row = tl.load(rows + at, mask=is_there, other=0) if has_rows else at
    entry = codes + row * n_bytes
    side = n_heads * half  # bytes of all keys, or of all values
    # keys: codes * scale + offset for each channel, then the inverse transform and the rotation
    packed = tl.load(entry[:, None] + head * half + channel[None], mask=both, other=0)
    of_group = tl.load(group + at, mask=is_there, other=0)
    scale = key_range + (of_group[:, None] * 2 * n_heads + head) * 2 * half + channel[None]
    offset = scale + n_heads * 2 * half
    first = (packed & 15).to(tl.float32) * tl.load(scale).to(tl.float32)
    first += tl.load(offset).to(tl.float32)
    second = (packed >> 4).to(tl.float32) * tl.load(scale + half).to(tl.float32)
    second += tl.load(offset + half).to(tl.float32)
    matrix = tl.load(hadamard + channel[:, None] * half + channel[None])
    first = tl.dot(first, matrix, input_precision="ieee")
    second = tl.dot(second, matrix, input_precision="ieee")
    place = tl.load(tokens + at, mask=is_there, other=0) if has_tokens else at
    turn = place[:, None] * half + channel[None]
    c, s = tl.load(cos + turn), tl.load(sin + turn)
    out = at[:, None] * of_entry + head * of_head + channel[None]
    kind = keys.dtype.element_ty
    tl.store(keys + out, (first * c - second * s).to(kind), mask=both)
    tl.store(keys + out + half, (second * c + first * s).to(kind), mask=both)
    # values: scale and offset of each token
    packed = tl.load(entry[:, None] + side + head * half + channel[None], mask=both, other=0)
    ranges = (entry + 2 * side).to(tl.pointer_type(tl.float16))
    scale_v = tl.load(ranges + head, mask=is_there, other=0).to(tl.float32)[:, None]
    offset_v = tl.load(ranges + n_heads + head, mask=is_there, other=0).to(tl.float32)[:, None]
    tl.store(values + out, ((packed & 15).to(tl.float32) * scale_v + offset_v).to(kind), mask=both)
    second_v = (packed >> 4).to(tl.float32) * scale_v + offset_v
    tl.store(values + out + half, second_v.to(kind), mask=both)


def write_entries(
    codes: Tensor, rows: Tensor | None, group: Tensor, tokens: Tensor | None, key_range: Tensor,
    cos: Tensor, sin: Tensor, hadamard: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """Write keys, rotated to their positions, and values of 4-bit entries into (n, G, D) each.

    codes: (m, E) uint8, see `EntryFormat`. rows: (n,) the row of codes of each entry; None for all.
    group: (n,) the row of key_range (N, 2, G, D) of each entry. cos, sin: (Tctx, D / 2) float32.
    tokens: (n,) the row of cos and sin of each entry; None for the first n. hadamard: (D / 2,
    D / 2) float32, the transform of each half of the channels. keys, values: with the same strides.
    """
    n_groups, _, n_heads, head_dim = key_range.shape
    assert all(x.is_contiguous() for x in (codes, group, key_range, cos, sin, hadamard))
    of_entry, of_head, of_channel = keys.stride()
    assert of_channel == 1 and keys.stride() == values.stride()
    n = len(group)
    grid = (triton.cdiv(n, _BLOCK), n_heads)
    # Triton launches on the current device
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]
        _write_entries[grid](
            codes, codes if rows is None else rows, group, group if tokens is None else tokens,
            key_range, cos, sin, hadamard, keys, values, n, of_entry, of_head,
            n_bytes=codes.shape[1], n_heads=n_heads, half=head_dim // 2, has_rows=rows is not None,
            has_tokens=tokens is not None, block=_BLOCK,
        )  # fmt: skip


@triton.jit
def _to_half(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _range(low, high):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The same bits as `EntryFormat._range`; a GPU's plain division does not round as IEEE does."""
    offset = _to_half(low - tl.abs(low) * 0.00048828125)  # 2^-11
    step = tl.div_rn(high - offset.to(tl.float32), tl.full(low.shape, 15.0, tl.float32))
    return _to_half(step + 5.960464477539063e-08), offset  # 2^-24


@triton.jit
def _codes(x, scale, offset):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """float32 codes; adding and subtracting 1.5 * 2^23 rounds half to even."""
    code = tl.div_rn(x - offset.to(tl.float32), scale.to(tl.float32))
    return tl.minimum(tl.maximum(code, 0.0), 15.0) + 12582912.0 - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def _encode_entries(  # type: ignore[no-untyped-def]  # noqa: ANN202
    keys, values, tokens, entries, key_range, largest,  # noqa: ANN001
    n_bytes: tl.constexpr, n_heads: tl.constexpr, half: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    group, head, channel = tl.program_id(0), tl.program_id(1), tl.arange(0, half)[None]
    row = tl.load(tokens + group * size + tl.arange(0, size))[:, None]
    at = (row * n_heads + head) * 2 * half + channel
    entry, side = entries + row * n_bytes, n_heads * half
    first, second = tl.load(keys + at), tl.load(keys + at + half)
    scale, offset = _range(tl.min(first, 0)[None], tl.max(first, 0)[None])
    scale_2, offset_2 = _range(tl.min(second, 0)[None], tl.max(second, 0)[None])
    to = key_range + (group * 2 * n_heads + head) * 2 * half + channel
    tl.store(to, scale)
    tl.store(to + half, scale_2)
    tl.store(to + n_heads * 2 * half, offset)
    tl.store(to + n_heads * 2 * half + half, offset_2)
    packed = _codes(first, scale, offset) + 16 * _codes(second, scale_2, offset_2)
    tl.store(entry + head * half + channel, packed.to(tl.uint8))
    first_v = tl.load(values + at).to(tl.float32)
    second_v = tl.load(values + at + half).to(tl.float32)
    low, high = tl.minimum(first_v, second_v), tl.maximum(first_v, second_v)
    scale, offset = _range(tl.min(low, 1)[:, None], tl.max(high, 1)[:, None])
    ranges = (entry + 2 * side).to(tl.pointer_type(tl.float16)) + head
    tl.store(ranges, scale)
    tl.store(ranges + n_heads, offset)
    packed = _codes(first_v, scale, offset) + 16 * _codes(second_v, scale, offset)
    tl.store(entry + side + head * half + channel, packed.to(tl.uint8))
    # NaN if any number is not finite: the others' differences to themselves are 0
    off = (first - first) + (second - second) + (first_v - first_v) + (second_v - second_v)
    most = tl.maximum(tl.maximum(tl.abs(first), tl.abs(second)), tl.abs(first_v))
    most = tl.max(tl.max(tl.maximum(most, tl.abs(second_v)), 1), 0)
    tl.store(largest + group * n_heads + head, most + tl.sum(tl.sum(off, 1), 0))


def encode_entries(
    keys: Tensor, values: Tensor, tokens: Tensor, n_bytes: int, group_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same bits as `EntryFormat.encode_chunks` in 4 bits, from transformed keys and values.

    keys: (T, G, D) float32, after the Hadamard transform. values: (T, G, D). tokens: the
    ``group_tokens`` tokens of each of N groups; a group may repeat a token.
    """
    n_tokens, n_heads, head_dim = keys.shape
    n_groups = len(tokens) // group_tokens
    entries = torch.empty(n_tokens, n_bytes, dtype=torch.uint8, device=keys.device)
    shape = n_groups, 2, n_heads, head_dim
    key_range = torch.empty(shape, dtype=torch.float16, device=keys.device)
    largest = torch.empty(n_groups, n_heads, dtype=torch.float32, device=keys.device)
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _encode_entries[(n_groups, n_heads)](
            keys.contiguous(), values.contiguous(), tokens, entries, key_range, largest,
            n_bytes=n_bytes, n_heads=n_heads, half=head_dim // 2, size=group_tokens,
        )  # fmt: skip
    return entries, key_range, largest.max()

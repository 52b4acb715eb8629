"""Formats of KV entries: quantised for the store; dequantised and rotated for attention.

Keys are quantised per channel over groups of tokens, because their outliers sit in channels, and
values per token and head (KIVI, arXiv 2402.02750, section 3). Both are asymmetric, so a channel
that a bias has moved far from zero, as in Qwen2.5, costs little.

A key is quantised after a Hadamard transform of each half of a head (QuaRot, arXiv 2404.00456,
transforms whole heads). The transform spreads the error evenly over the channels. Without it, a
channel with a wide range would lose most, and queries weigh such channels most.

Keys are stored un-rotated, without a position, so that one cache serves every place in every
prompt. RoPE uses the model's own cos and sin, in the model's dtype; the arithmetic is float32 and
rounds once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import isfinite

import torch
from torch import Tensor

from samkv_integrations.errors import Given, InvalidChunk
from samkv_integrations.option import STORE_BITS, among

GROUP_TOKENS = 64
"""Tokens whose keys share scale and offset per channel (docs/decisions.md)."""

_log = logging.getLogger(__name__)

_HALF_MAX = torch.finfo(torch.float16).max
HALF_STEP = 2.0**-24
"""The smallest positive float16."""

_HALF_MARGIN = 2.0**-11  # the relative error of rounding to float16

_TILE = 1 << 18
"""Numbers of keys per tile: a few MB, so that a tile fits a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class EntryFormat:
    """The layout of the KV entry of one token at one layer, E bytes.

    With 4 or 8 bits: codes of the keys, (G, D * bits / 8), codes of the values likewise, then scale
    and offset of the values, (G,) float16 each. With 4 bits a byte holds channel d in its lower
    half and channel d + D / 2 in its upper half. With 16 bits: keys and values, (G, D) each, in
    ``dtype``.

    Raises InvalidOption if ``bits`` is not one of `STORE_BITS`. RoPE rotates pairs: D is even.
    """

    bits: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        among(*STORE_BITS)("store_bits", self.bits)

    @cached_property
    def is_quantised(self) -> bool:
        return self.bits < 16

    @cached_property
    def _side(self) -> int:
        """Bytes of the keys, and of the values, without scales."""
        bits = self.bits if self.is_quantised else 8 * self.dtype.itemsize
        return self.n_kv_heads * self.head_dim * bits // 8

    @cached_property
    def n_bytes(self) -> int:
        """E, the bytes of an entry."""
        return 2 * self._side + (4 * self.n_kv_heads if self.is_quantised else 0)

    def range_shape(self, n_tokens: int) -> tuple[int, int, int, int]:
        """Shape of the key range of a layer: (N, 2, G, D); N is 0 with 16 bits."""
        n_groups = -(-n_tokens // GROUP_TOKENS) if self.is_quantised else 0
        return (n_groups, 2, self.n_kv_heads, self.head_dim)

    def encode_chunks(
        self, keys: Tensor, values: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Entries, key ranges, and the number for `check`, of un-rotated keys and values (T, G, D).

        lengths: tokens of each chunk, one chunk behind the other, T in all. The number of
        operations is the same for any number of chunks, and the host does not wait for the device.

        The entries are (T, E) uint8. The key ranges are (N, 2, G, D) float16, those of all chunks:
        scale and offset of each channel in each group of `GROUP_TOKENS` tokens; the last group of a
        chunk may be shorter.
        """
        if not self.is_quantised:
            largest = torch.maximum(keys.float().abs().max(), values.float().abs().max())
            sides = [
                side.to(self.dtype).contiguous().view(torch.uint8).flatten(1)
                for side in (keys, values)
            ]
            no_range = keys.new_empty(self.range_shape(0), dtype=torch.float16)
            return torch.cat(sides, dim=1), no_range, largest
        transformed = self._transform(keys.float())
        if transformed.is_cuda and (encode := encoder_of(self)) is not None:
            tokens, _ = _groups_of(tuple(lengths), transformed.device)
            return encode(transformed, values, tokens, self.n_bytes, GROUP_TOKENS)
        return self._encode(transformed, values, lengths)

    def _encode(
        self, transformed: Tensor, values: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`encode_chunks` of transformed keys, float32, operation by operation."""
        wide = values.float()
        tokens, at = _groups_of(tuple(lengths), transformed.device)
        of_groups = transformed.index_select(0, tokens).view(
            -1, GROUP_TOKENS, *transformed.shape[1:]
        )
        ends = of_groups.amin(1), of_groups.amax(1), wide.amin(-1), wide.amax(-1)
        # The maximum is NaN if any number is. A test of every number takes five times as long.
        largest = torch.cat([side.flatten() for side in ends]).abs().max()
        key_range = self._range(*ends[:2]).transpose(0, 1).contiguous()
        scale, offset = key_range.float()[:, :, None].unbind(1)
        of_keys = self._pack(of_groups.sub_(offset).div_(scale).flatten(0, 1)).index_select(0, at)
        value_range = self._range(*ends[2:])  # (2, T, G)
        scale, offset = value_range.float()[..., None]
        of_values = self._pack(wide.sub(offset).div_(scale))
        of_tokens = value_range.transpose(0, 1).contiguous().view(torch.uint8).flatten(1)
        return torch.cat((of_keys, of_values, of_tokens), dim=1), key_range, largest

    def check(self, largest: float) -> None:
        """Raises InvalidChunk if a key or value is not finite, or too large for a float16 scale."""
        if not isfinite(largest):
            raise InvalidChunk(
                "the model computed keys or values that are not finite numbers for this chunk; "
                "leave it out, or load the model in float32"
            )
        if self.is_quantised and largest > _HALF_MAX:
            raise InvalidChunk(
                f"transformed keys or values reach {largest:.3g}, beyond {_HALF_MAX:.0f}, the "
                "largest half-precision number, in which scales are stored; give ",
                Given("store_bits", 16),
            )

    def keys(self, entries: Tensor, key_range: Tensor, group: Tensor) -> Tensor:
        """(T, G, D) un-rotated keys of entries (T, E): float32, or ``dtype`` with 16 bits.

        key_range: (N, 2, G, D). group: (T,) the row of key_range of each token.
        """
        side = entries[:, : self._side]
        if not self.is_quantised:
            return self._raw(side)
        # index_select copies whole rows, several times faster than indexing
        scale, offset = key_range.float().index_select(0, group).unbind(1)
        return self._transform(torch.addcmul(offset, self._codes(side), scale))

    def values(self, entries: Tensor) -> Tensor:
        """(T, G, D) values of entries (T, E): float32, or ``dtype`` with 16 bits."""
        side = entries[:, self._side : 2 * self._side]
        if not self.is_quantised:
            return self._raw(side)
        ranges = entries[:, 2 * self._side :].view(torch.float16).float()
        scale, offset = ranges.view(len(entries), 2, self.n_kv_heads, 1).unbind(1)
        return self._codes(side).mul_(scale).add_(offset)

    @cached_property
    def _hadamard_channels(self) -> int:
        """Size of the Hadamard transform: the largest power of two that divides D / 2."""
        half = self.head_dim // 2
        return half & -half

    def _transform(self, channels: Tensor) -> Tensor:
        """The Hadamard transform, its own inverse, of float32 channels (..., D or D / 2)."""
        size = self._hadamard_channels
        return (channels.reshape(-1, size) @ _hadamard(size, channels.device)).view_as(channels)

    def _range(self, low: Tensor, high: Tensor) -> Tensor:
        """(2, ...) float16 scale and offset for numbers from low to high, float32."""
        # Rounded down, so that no number is below code 0 by more than half the smallest scale.
        offset = as_half(low - low.abs() * _HALF_MARGIN)
        scale = as_half((high - offset.float()) / (2**self.bits - 1) + HALF_STEP)
        return torch.stack((scale, offset))

    def _raw(self, side: Tensor) -> Tensor:
        numbers = side.contiguous().view(self.dtype)
        return numbers.view(len(side), self.n_kv_heads, self.head_dim)

    def _pack(self, codes: Tensor) -> Tensor:
        """(T, G, D) float codes -> (T, bytes)."""
        whole = codes.round_().clamp_(0, 2**self.bits - 1)
        if self.bits == 4:  # in floats, as operations on bytes are several times slower
            lower, upper = whole.chunk(2, dim=-1)
            whole = lower.add_(upper, alpha=16)
        return whole.to(torch.uint8).flatten(1)

    def _codes(self, side: Tensor) -> Tensor:
        """(T, bytes) -> (T, G, D) codes, float32."""
        packed = side.view(len(side), self.n_kv_heads, side.shape[1] // self.n_kv_heads)
        if self.bits == 8:
            return packed.float()
        shape, half = (len(side), self.n_kv_heads, self.head_dim), self.head_dim // 2
        codes = torch.empty(shape, dtype=torch.float32, device=side.device)
        torch.bitwise_and(packed, 15, out=codes[..., :half])
        torch.bitwise_right_shift(packed, 4, out=codes[..., half:])
        return codes


@lru_cache(maxsize=16)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """(size, size) float32, orthogonal and symmetric; ``size`` is a power of two (Sylvester)."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.div(size**0.5)


def groups(n_tokens: int, device: torch.device) -> Tensor:
    """(T,) the number of the group of each token of a chunk."""
    return torch.arange(n_tokens, device=device) // GROUP_TOKENS


@lru_cache(maxsize=4)
def _groups_of(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(N * GROUP_TOKENS,) the tokens of each group of all chunks; (T,) each token's index there.

    A short group repeats its chunk's last token, which changes neither the smallest nor the largest
    number of the group.
    """
    where = device if len(lengths) == 1 else torch.device("cpu")  # copied at once if many
    tokens, at, first, n_before = list[Tensor](), list[Tensor](), 0, 0
    for length in lengths:
        n_rows = -(-length // GROUP_TOKENS) * GROUP_TOKENS
        rows = torch.arange(n_rows, device=where)
        tokens.append(rows.clamp(max=length - 1) + first)
        at.append(rows[:length] + n_before)
        first, n_before = first + length, n_before + n_rows
    return torch.cat(tokens).to(device), torch.cat(at).to(device)


def as_half(values: Tensor) -> Tensor:
    """The nearest float16, overflow clamped to the largest finite one."""
    return values.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


# -- positions -----------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (..., T, heads, D) to the positions of ``cos`` and ``sin`` (T, D).

    Same dtype as ``x``. Paper of the rotation: RoFormer, arXiv 2104.09864, equation 34.
    """
    half = x.shape[-1] // 2
    cos, sin = (side[..., None, :half].float() for side in (cos, sin))
    return _turn(x.float(), cos, sin).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin``, half by half, without a copy of ``x`` (..., D).

    cos, sin: (..., D / 2), the same for both halves. On a CPU, broadcasting over heads takes twice
    as long.
    """
    turned, half = torch.empty_like(x), x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:]).addcmul_(first, sin)
    return turned


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, exact up to one rounding to the dtype of ``x``.

    The model's cos and sin, rounded to bfloat16, do not satisfy cos^2 + sin^2 = 1. The inverse
    divides by that sum; else every stored key would be off by up to 0.5 %.
    """
    cos, sin, norm = _inverse(cos, sin)
    return _turn(x.float(), cos, sin).div_(norm).to(x.dtype)


@lru_cache(maxsize=4)
def _inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that `unrotate` shares among the layers of a pass."""
    cos, sin = (side[..., None, : side.shape[-1] // 2].float() for side in (cos, sin))
    norm = cos.square() + sin.square()
    return cos, -sin, torch.cat((norm, norm), -1)


# -- entries of a context ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Entries of n tokens, and the positions of their keys.

    codes: (m, E) uint8, see `EntryFormat`. rows: (n,) the row of codes of each token; None for all.
    key_range: (N, 2, G, D) float16. group: (n,) the row of key_range of each token.
    cos, sin: (Tctx, G, D / 2) float32, contiguous, for all context tokens; on a GPU (Tctx, 1,
    D / 2). tokens: (n,) the row of cos and sin of each token; None for all.
    """

    form: EntryFormat
    codes: Tensor
    key_range: Tensor
    group: Tensor
    cos: Tensor
    sin: Tensor
    tokens: Tensor | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.group)

    @property
    def n_bytes(self) -> int:
        """Bytes of codes and key range."""
        return self.codes.nbytes + self.key_range.nbytes

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """(n, G, D) each, see `write`."""
        shape = (2, len(self), self.form.n_kv_heads, self.form.head_dim)
        keys, values = torch.empty(shape, dtype=self.form.dtype, device=self.codes.device)
        self.write(keys, values)
        return keys, values

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write keys, rotated to their positions, and values, into (n, G, D) each.

        One kernel does it where `kernel_of` finds one. A CPU computes `_TILE` numbers at a time,
        which is faster than all at once.
        """
        if self.codes.is_cuda and (kernel := kernel_of(self.form)) is not None:
            cos, sin = self.cos[:, 0], self.sin[:, 0]
            matrix = _hadamard(self.form.head_dim // 2, self.codes.device)
            kernel(
                self.codes, self.rows, self.group, self.tokens, self.key_range, cos, sin, matrix,
                keys, values,
            )  # fmt: skip
            return
        for part in self._parts(self.form.n_kv_heads * self.form.head_dim):
            codes = self._codes(part)
            keys[part] = self._rotated(part, codes)
            values[part] = self.form.values(codes)

    def logits(self, query: Tensor) -> Tensor:
        """(G, H / G, n) float32 products of a query (H, D) with all keys, which are not rounded."""
        grouped = query.float().view(self.form.n_kv_heads, -1, self.form.head_dim)
        logits = grouped.new_empty(*grouped.shape[:2], len(self))
        for part in self._parts(grouped[:, 0].numel()):
            rotated = self._rotated(part, self._codes(part))
            logits[..., part] = grouped @ rotated.permute(1, 2, 0)
        return logits

    def _parts(self, n_numbers: int) -> Iterator[slice]:
        """Slices of the tokens, each computed at a time. n_numbers: numbers of a token's keys."""
        size = max(1, _TILE // n_numbers) if self.codes.is_cpu else len(self)
        for first in range(0, len(self), size):
            yield slice(first, first + size)

    def _codes(self, part: slice) -> Tensor:
        if self.rows is None:
            return self.codes[part]
        return self.codes.index_select(0, self.rows[part])

    def _rotated(self, part: slice, codes: Tensor) -> Tensor:
        """(m, G, D) float32 keys of some entries, rotated to their positions.

        A pass spends most of its time for context tokens here.
        """
        if self.tokens is None:
            cos, sin = self.cos[part], self.sin[part]
        else:
            at = self.tokens[part]
            cos, sin = self.cos.index_select(0, at), self.sin.index_select(0, at)
        keys = self.form.keys(codes, self.key_range, self.group[part])
        return _turn(keys if self.form.is_quantised else keys.float(), cos, sin)

    def select(self, at: Tensor) -> Entries:
        """The entries at indices (k,)."""
        # index_select copies whole rows, several times faster than indexing
        return replace(
            self,
            codes=self.codes.index_select(0, at if self.rows is None else self.rows[at]),
            rows=None,
            group=self.group.index_select(0, at),
            tokens=at if self.tokens is None else self.tokens.index_select(0, at),
        )

    def with_computed(self, at: Tensor, keys: Tensor, values: Tensor) -> Entries:
        """A copy with these rotated keys and values (k, G, D) at indices (k,), in own groups."""
        if not len(at):
            return self
        tokens = at if self.tokens is None else self.tokens[at]
        cos, sin = (
            torch.cat((side, side), -1) for side in (self.cos[tokens, 0], self.sin[tokens, 0])
        )
        unrotated = unrotate(keys.float(), cos, sin).to(self.form.dtype)
        codes, key_range, _ = self.form.encode_chunks(unrotated, values, [len(at)])
        group = len(self.key_range) + groups(len(at), at.device)
        return replace(
            self,
            codes=self.codes.index_copy(0, at, codes),
            key_range=torch.cat((self.key_range, key_range)),
            group=self.group.index_copy(0, at, group),
        )


def _may_have_kernels(form: EntryFormat) -> bool:
    half = form.head_dim // 2
    is_suited = form.bits == 4 and form._hadamard_channels == half and half >= 16
    return is_suited and torch.cuda.is_available()


@lru_cache(maxsize=16)
def encoder_of(form: EntryFormat) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """`triton_kernels.encode_entries` if a trial gives the operations' bits; else None."""
    if not _may_have_kernels(form):
        return None
    try:
        from samkv_integrations.runtimes.transformers.entries import triton_kernels

        lengths, shape = (70, 5), (2, 75, form.n_kv_heads, form.head_dim)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
        drawn[:, :, :, 0] += 300
        given = drawn[0], drawn[1].to(form.dtype)
        tokens, _ = _groups_of(lengths, drawn.device)
        found = triton_kernels.encode_entries(*given, tokens, form.n_bytes, GROUP_TOKENS)
        if not all(map(torch.equal, found, form._encode(*given, lengths))):
            raise RuntimeError("Triton's kernel gives other bits than PyTorch's operations")
    except Exception as error:  # from Triton, see `kernel_of`
        _log.warning("chunk caches are encoded step by step, which is slower: %s", error)
        return None
    return triton_kernels.encode_entries


@lru_cache(maxsize=16)
def kernel_of(form: EntryFormat) -> Callable[..., None] | None:
    """`triton_kernels.write_entries` if it runs here; None if not, which is only slower."""
    if not _may_have_kernels(form):
        return None
    half = form.head_dim // 2
    try:
        from samkv_integrations.runtimes.transformers.entries import triton_kernels

        device = torch.device("cuda")
        turns = torch.ones(1, half, dtype=torch.float32, device=device)
        shape = (2, 1, form.n_kv_heads, form.head_dim)
        triton_kernels.write_entries(
            torch.zeros(1, form.n_bytes, dtype=torch.uint8, device=device), None,
            groups(1, device), None,
            torch.zeros(form.range_shape(1), dtype=torch.float16, device=device), turns, turns,
            _hadamard(half, device), *torch.empty(shape, dtype=form.dtype, device=device),
        )  # fmt: skip
    except Exception as error:  # from Triton, which needs a C compiler
        _log.warning("chunk caches are decoded step by step, which is slower: %s", error)
        return None
    return triton_kernels.write_entries

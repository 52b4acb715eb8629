"""Linear layers whose weights stay packed in memory, and are multiplied packed, on a CPU.

A decoded token reads every weight once, so it takes as long as the bytes of the weights. Blocks of
Q4_0, Q4_1 and Q4_K become groups of 32 numbers of 4 bits, with a bfloat16 scale and offset each;
every other kind becomes numbers of 8 bits, with a scale for each row. Only decoding uses these
products, and short passes whose entries are not kept. Every other pass multiplies by the exact
weights, so that chunk caches do not depend on the packing. See docs/decisions.md.

The kernels are private to PyTorch. No other file calls them, and `kernels_work` compares them with
plain products before a model uses them.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samkv_integrations.errors import ModelNotFound, UnsupportedModel
from samkv_integrations.runtimes.transformers.model.attention import is_faster
from samkv_integrations.runtimes.transformers.model.gguf_blocks import parts_of, values_of

_log = logging.getLogger(__name__)

MOST_TOKENS = 12
"""Most tokens of a packed product: from 16 tokens on bfloat16 is faster (AMD EPYC)."""

MOST_TOKENS_UNPACKING = 128
"""The same if bfloat16 needs the weights unpacked first: unpacking takes as long as packed products
of so many tokens with 4 bits, and of 250 tokens with 8 bits (docs/decisions.md)."""

_GROUP = 32
BLOCK_NUMBERS = 2**18
"""Weights that are unpacked at a time, when a model is loaded and in products by row blocks."""

MOST_WHOLE = 2**26
"""Most weights of a matrix that a product unpacks whole; only output matrices have more."""

LARGE = 2**21
"""Fewest weights of a matrix for which `LargeInt8Matrix` is faster than `Int8Matrix`."""

LARGE_BLOCK = 5 * 2**20
"""Weights of a `LargeInt8Matrix` that are packed at a time."""


# -- where exact weights come from -------------------------------------------------------------


class Exact(Protocol):
    """A matrix (n_rows, n_columns) whose exact values are computed on demand."""

    n_rows: int
    n_columns: int

    def rows(self, first: int, last: int) -> Tensor:
        """(last - first, n_columns) float32: the rows from ``first`` to ``last``, exclusive."""
        ...


class OpenFile:
    """A file that stays open, so that a file of the same name cannot take its place.

    A read raises ModelNotFound if the file was changed or cut after it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._stamp = self._stamped()

    def __deepcopy__(self, memo: object) -> OpenFile:
        return self

    def _stamped(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def read(self, at: int, n_bytes: int) -> Tensor:
        """(n_bytes,) uint8: the bytes from ``at`` on."""
        data = os.pread(self._file.fileno(), n_bytes, at)
        if len(data) != n_bytes or self._stamped() != self._stamp:
            raise ModelNotFound(
                f"{str(self.path)!r} was changed after the model was loaded, and the model "
                "still reads weights from it; load the model again"
            )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class FileMatrix:
    """A matrix in a GGUF file.

    Args:
        file, at: the file, and the offset of its bytes there.
        kind: the type of its blocks.
        shape: rows and columns.
        order: (n_rows,) for each row, its number in the file; None for the same order.
    """

    def __init__(
        self, file: OpenFile, at: int, kind: Any, shape: tuple[int, int], order: Tensor | None  # noqa: ANN401
    ) -> None:  # fmt: skip
        from gguf import GGML_QUANT_SIZES

        self.kind = kind
        self.n_rows, self.n_columns = shape
        n_numbers, n_bytes = GGML_QUANT_SIZES[kind]
        self._row_bytes = self.n_columns // n_numbers * n_bytes
        self._file, self._at = file, at
        self._order = order

    def blocks(self, first: int, last: int) -> Tensor:
        """(last - first, bytes of a row) uint8: the rows as the file has them."""
        if self._order is None:
            at = self._at + first * self._row_bytes
            return self._file.read(at, (last - first) * self._row_bytes).view(last - first, -1)
        whole = self._file.read(self._at, self.n_rows * self._row_bytes)
        return whole.view(self.n_rows, -1)[self._order[first:last]]

    def rows(self, first: int, last: int) -> Tensor:
        return self._values(self.blocks(first, last))

    def rows_at(self, indices: list[int]) -> Tensor:
        """(indices, n_columns) float32."""
        return self._values(torch.cat([self.blocks(row, row + 1) for row in indices]))

    def _values(self, blocks: Tensor) -> Tensor:
        if (parts := parts_of(self.kind, blocks)) is not None:
            return values_of(parts)
        import gguf

        try:
            return torch.tensor(gguf.dequantize(blocks.numpy(), self.kind))
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{str(self._file.path)!r} holds weights of the type {self.kind.name}, which the "
                "gguf package does not dequantise; give a file of another type, such as Q4_K_M"
            ) from error


def row_blocks(matrix: Exact, n_numbers: int = BLOCK_NUMBERS) -> Iterator[tuple[int, int]]:
    """First and last row of blocks of about ``n_numbers``; all but the last have 64 x n rows."""
    step = max(1, n_numbers // matrix.n_columns // 64) * 64
    for first in range(0, matrix.n_rows, step):
        yield first, min(first + step, matrix.n_rows)


def unpack(matrix: Exact, first: int, last: int, into: Tensor) -> Tensor:
    """Fill ``into`` (last - first, n_columns) with these rows, block by block; returns it."""
    step = max(1, BLOCK_NUMBERS // matrix.n_columns)
    for at in range(first, last, step):
        end = min(at + step, last)
        into[at - first : end - first] = matrix.rows(at, end)
    return into


def unpacked(matrix: Exact, dtype: torch.dtype) -> Tensor:
    """(n_rows, n_columns): all rows."""
    into = torch.empty(matrix.n_rows, matrix.n_columns, dtype=dtype)
    return unpack(matrix, 0, matrix.n_rows, into)


# -- packed matrices ---------------------------------------------------------------------------


class Int4Matrix:
    """Numbers of 4 bits, with a scale and an offset for each group of 32.

    Args:
        shape: rows, a multiple of 16, and columns, a multiple of 32.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.n_rows, self.n_columns = shape
        self._codes = torch.empty(self.n_rows, self.n_columns // 2, dtype=torch.uint8)
        self._scales = torch.empty(
            self.n_columns // _GROUP, self.n_rows, 2, dtype=torch.bfloat16
        )  # fmt: skip

    @property
    def n_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def fill(self, first: int, codes: Tensor, scale: Tensor, offset: Tensor) -> None:
        """Set the rows from ``first`` on to scale * codes + offset.

        codes: (n, n_columns) from 0 to 15. scale, offset: (n, n_columns / 32).
        """
        last = first + len(codes)
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self._codes[first:last] = packed
        self._scales[:, first:last, 0] = scale.t()
        self._scales[:, first:last, 1] = (offset + 8 * scale).t()  # the kernel counts codes from 8

    def product(self, x: Tensor) -> Tensor:
        """(n, n_columns) bfloat16 or float32 -> (n, n_rows), computed in bfloat16."""
        # torch's own function: a call through torch.ops takes 1 us longer
        in_bfloat16 = x.bfloat16()
        product = torch._weight_int4pack_mm_for_cpu(in_bfloat16, self._codes, _GROUP, self._scales)
        return product.to(x.dtype)


class Int8Matrix:
    """Numbers of 8 bits, with a scale for each row. `rows` gives its numbers exactly.

    Args:
        codes: memory for the numbers; None to allocate it.
    """

    def __init__(self, shape: tuple[int, int], codes: Tensor | None = None) -> None:
        self.n_rows, self.n_columns = shape
        self.codes = torch.empty(shape, dtype=torch.int8) if codes is None else codes.view(shape)
        self.scales = torch.empty(self.n_rows, dtype=torch.bfloat16)

    @staticmethod
    def row_bytes(n_columns: int) -> int:
        """Bytes of a row, with its scale."""
        return n_columns + 2

    @property
    def n_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def fill(self, first: int, values: Tensor) -> None:
        """Set the rows from ``first`` on to ``values`` (n, n_columns) float32, rounded."""
        last, smallest = first + len(values), torch.finfo(torch.float32).tiny
        scales = (values.abs().amax(1) / 127).clamp_min(smallest).bfloat16()
        codes = (values / scales.float()[:, None]).round_().clamp_(-127, 127)
        self.codes[first:last], self.scales[first:last] = codes, scales

    def rows(self, first: int, last: int) -> Tensor:
        return self.codes[first:last].float() * self.scales[first:last].float()[:, None]

    def product(self, x: Tensor) -> Tensor:
        """(n, n_columns) bfloat16 or float32 -> (n, n_rows), computed in bfloat16."""
        return torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.scales).to(x.dtype)


class LargeInt8Matrix:
    """The weights of `Int8Matrix` for oneDNN's int8 kernels, which are twice as fast.

    The kernels take int8 inputs. Each row of an input is scaled to 16-bit integers, and their high
    and low bytes are multiplied as two rows. This keeps bfloat16's precision.
    """

    _base = 256
    _largest = 127 * _base  # largest integer

    def __init__(self, shape: tuple[int, int]) -> None:
        self.n_rows, self.n_columns = shape
        self._blocks: list[Any] = []  # in the kernels' layout
        self._no_zeros = torch.empty(0, dtype=torch.int32)

    def __deepcopy__(self, memo: object) -> LargeInt8Matrix:
        return self  # it never changes, and tensors in oneDNN's layout cannot be deep-copied

    @staticmethod
    def row_bytes(n_columns: int) -> int:
        """Bytes of a row, with its scale."""
        return n_columns + 4

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes(self.n_columns)

    def append(self, rows: Int8Matrix) -> None:
        packed = torch.ops.onednn.qlinear_prepack(rows.codes, [2, self.n_columns])
        self._blocks.append((packed, rows.scales.float()))

    def product(self, x: Tensor) -> Tensor:
        """(n, n_columns) bfloat16 or float32 -> (n, n_rows)."""
        n = len(x)
        step = x.abs().amax(1, keepdim=True).float().clamp_min_(_TINY).div_(self._largest)
        digits, products = self._digits(x / step), []
        for block in self._blocks:
            found = self._times(digits, block)
            product = torch.add(found[:n], found[n:], alpha=self._base).mul_(step)
            products.append(product.to(x.dtype))
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def _digits(self, x: Tensor) -> Tensor:
        """(2 n, n_columns): the low and the high digits of x (n, n_columns), for `_times`."""
        # adding 257 * 128 makes each byte a number from -128 to 127, plus 128
        numbers = x.add_(257 * 128 + 0.5).int().view(torch.uint8).view(len(x), -1, 4)
        return numbers[..., :2].permute(2, 0, 1).reshape(2 * len(x), -1)

    def _times(self, digits: Tensor, block: Any) -> Tensor:  # noqa: ANN401
        """(n, n_columns) digits -> (n, rows of the block) float32."""
        codes, scales = block
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            digits, 1.0, 128, codes, scales, self._no_zeros, None, 1.0, 0, torch.float32,
            "none", [], "",
        )  # fmt: skip
        return product


class SevenBitMatrix(LargeInt8Matrix):
    """The same for FBGEMM's int8 kernels, and for processors without VNNI instructions.

    On these, the sum of two products of bytes has 16 bits, which digits of 7 bits do not overflow.
    Two digits are 14 bits of a row's largest number.
    """

    _base = 128
    _largest = 63 * _base

    @staticmethod
    def row_bytes(n_columns: int) -> int:
        """Bytes of a row, in blocks of 512, with its scale, zero and sum."""
        return n_columns + -n_columns % 512 + 12

    def append(self, rows: Int8Matrix) -> None:
        scales, zeros = rows.scales.double(), torch.zeros(len(rows.scales), dtype=torch.long)
        with warnings.catch_warnings(action="ignore"):  # a warning of deprecation
            quantised = torch._make_per_channel_quantized_tensor(rows.codes, scales, zeros, 0)
        self._blocks.append(torch.ops.quantized.linear_prepack(quantised, None))

    def _digits(self, x: Tensor) -> Tensor:
        high = x.round_().div(self._base).round_()
        return torch.cat((torch.sub(x, high, alpha=self._base), high))

    def _times(self, digits: Tensor, block: Any) -> Tensor:  # noqa: ANN401
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        product: Tensor = multiply(digits, 1.0, 64, block)
        return product


_TINY = torch.finfo(torch.float32).tiny * 2**16

Packed = Int4Matrix | Int8Matrix | LargeInt8Matrix


class Part:
    """Some rows of a matrix that several matrices were joined into."""

    def __init__(self, whole: Packed, first: int, n_rows: int) -> None:
        self.whole, self.first = whole, first
        self.n_rows, self.n_columns = n_rows, whole.n_columns

    def product(self, x: Tensor) -> Tensor:
        """(n, n_columns) bfloat16 or float32 -> (n, n_rows)."""
        return self.whole.product(x)[:, self.first : self.first + self.n_rows].contiguous()


def pack(matrices: Sequence[FileMatrix], buffer: Buffer) -> list[Packed | Part]:
    """Pack matrices with the same input, block by block; matrices of one kind become parts of one.

    No temporary memory is larger than ``buffer``: memory that is freed between the weights would
    stay with the process.
    """
    in_4_bits = {has_4_bits(each.kind, (each.n_rows, each.n_columns)) for each in matrices}
    if len(matrices) > 1 and (len(in_4_bits) > 1 or any(each.n_rows % 64 for each in matrices)):
        return [packed for each in matrices for packed in pack([each], buffer)]
    shape = sum(each.n_rows for each in matrices), matrices[0].n_columns
    kind = Int4Matrix if True in in_4_bits else kind_of_8_bits(shape[0] * shape[1])
    whole: Packed = kind(shape)
    parts, n_filled = list[Packed | Part](), 0
    for matrix in matrices:
        _fill(whole, n_filled, matrix, buffer)
        parts.append(Part(whole, n_filled, matrix.n_rows))
        n_filled += matrix.n_rows
    return parts if len(parts) > 1 else [whole]


def _fill(whole: Packed, at: int, matrix: FileMatrix, buffer: Buffer) -> None:
    """Set the rows from ``at`` on."""
    if isinstance(whole, Int4Matrix):
        for first, last in row_blocks(matrix):
            parts = parts_of(matrix.kind, matrix.blocks(first, last))
            assert parts is not None
            codes, scale, offset = parts
            if offset is None:  # its codes are signed
                codes, offset = codes + 8, -8 * scale
            whole.fill(at + first, codes, scale, offset)
    elif isinstance(whole, Int8Matrix):
        for first, last in row_blocks(matrix):
            whole.fill(at + first, matrix.rows(first, last))
    else:
        for start, end in row_blocks(matrix, LARGE_BLOCK):
            shape = end - start, matrix.n_columns
            some = Int8Matrix(shape, buffer.memory(shape[0] * shape[1], torch.int8))
            step = max(1, BLOCK_NUMBERS // matrix.n_columns)
            for first in range(start, end, step):
                some.fill(first - start, matrix.rows(first, min(first + step, end)))
            whole.append(some)


def has_4_bits(kind: Any, shape: tuple[int, int]) -> bool:  # noqa: ANN401
    """Whether a matrix of this kind is packed in 4 bits."""
    return kind.name in ("Q4_0", "Q4_1", "Q4_K") and shape[0] % 16 == 0


def packed_bytes(kind: Any, shape: tuple[int, int]) -> int:  # noqa: ANN401
    """Bytes of a packed matrix."""
    n_numbers = shape[0] * shape[1]
    if has_4_bits(kind, shape):
        return n_numbers * 5 // 8
    return kind_of_8_bits(n_numbers).row_bytes(shape[1]) * shape[0]


def kind_of_8_bits(n_numbers: int) -> type[Int8Matrix | LargeInt8Matrix]:
    """The class that packs a matrix of ``n_numbers`` in 8 bits."""
    return (large_kind() if n_numbers >= LARGE else None) or Int8Matrix


@cache
def kernels_work() -> bool:
    """Whether the kernels of this PyTorch give the products of unpacked weights; logs if not."""
    try:
        if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            raise ValueError("this processor would multiply number by number")
        trial = _Trial()
        in_4_bits, in_8_bits = Int4Matrix(trial.shape), Int8Matrix(trial.shape)
        for first, last in row_blocks(trial, trial.n_columns * 128):
            rows = slice(first, last)
            in_4_bits.fill(first, trial.codes[rows], trial.scale[rows], trial.offset[rows])
            in_8_bits.fill(first, trial.rows(first, last))
        for matrix in (in_4_bits, in_8_bits):
            if not (error := trial.error_of(matrix)) < 0.02:
                raise ValueError(f"a trial product differs by {error:.2g}")
    except (AttributeError, RuntimeError, ValueError, TypeError) as error:  # of a missing operator
        _log.warning(
            "weights are unpacked: PyTorch %s has no products of packed weights here (%s)",
            torch.__version__, str(error).splitlines()[0],
        )  # fmt: skip
        return False
    return True


@cache
def large_kind() -> type[LargeInt8Matrix] | None:
    """The kernels for large matrices, by a trial of .1 s; None if `Int8Matrix` is as fast.

    oneDNN's are not exact without VNNI instructions, as their sums overflow.
    """
    for kind in (LargeInt8Matrix, SevenBitMatrix):
        try:
            trial = _Trial()
            rows, large = Int8Matrix(trial.shape), kind(trial.shape)
            rows.fill(0, trial.rows(0, trial.n_rows))
            large.append(rows)
            if trial.error_of(large) < 0.02 and (kind is LargeInt8Matrix or _is_faster(kind)):
                return kind
        except (AttributeError, RuntimeError, ValueError, TypeError):
            pass  # this PyTorch or this processor lacks the kernels
    return None


def _is_faster(kind: type[LargeInt8Matrix]) -> bool:
    """Whether ``kind`` beats `Int8Matrix` for a large matrix and one token."""
    rows, large = Int8Matrix((4096, 1024)), kind((4096, 1024))
    rows.codes.fill_(1)  # the trial takes few bytes, as these would stay with the process
    rows.scales.fill_(1)
    large.append(rows)
    x = torch.ones(1, 1024)
    return is_faster(partial(large.product, x), partial(rows.product, x), by=0.9)


class _Trial:
    """Weights that 4 bits hold exactly, to try the kernels with."""

    def __init__(self) -> None:
        self.n_rows, self.n_columns = self.shape = 1040, 512
        random = torch.Generator().manual_seed(0)
        self.codes = torch.randint(0, 16, self.shape, generator=random)
        n_groups = self.n_columns // _GROUP
        self.scale = torch.rand(self.n_rows, n_groups, generator=random).bfloat16().float()
        self.offset = torch.randn(self.n_rows, n_groups, generator=random).bfloat16().float()
        self._x = torch.randn(MOST_TOKENS, self.n_columns, generator=random).bfloat16()

    def rows(self, first: int, last: int) -> Tensor:
        scale, offset = (side[first:last, :, None] for side in (self.scale, self.offset))
        grouped = self.codes[first:last].view(last - first, -1, _GROUP) * scale + offset
        return grouped.view(last - first, -1)

    @torch.inference_mode()
    def error_of(self, packed: Packed) -> float:
        """Largest relative error of products with 1 and `MOST_TOKENS` tokens; may be NaN."""
        errors = []
        for x in (self._x[:1], self._x):
            expected = x.float() @ self.rows(0, self.n_rows).t()
            errors.append((packed.product(x).float() - expected).norm() / expected.norm())
        return float(torch.stack(errors).max())


# -- modules -----------------------------------------------------------------------------------


class _Decoding(threading.local):
    active = False


_decoding = _Decoding()


@contextmanager
def packed_products() -> Iterator[None]:
    """Inside this block, this thread multiplies few tokens by packed weights."""
    before, _decoding.active = _decoding.active, True
    try:
        yield
    finally:
        _decoding.active = before


class Buffer:
    """Memory for one unpacked matrix at a time, which the layers of a model share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __deepcopy__(self, memo: object) -> Buffer:
        return Buffer()

    def memory(self, n_numbers: int, dtype: torch.dtype) -> Tensor:
        """(n_numbers,) uninitialised numbers."""
        n_bytes = n_numbers * dtype.itemsize
        if self._bytes.numel() < n_bytes:
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8)
        return self._bytes[:n_bytes].view(dtype)

    def product(self, x: Tensor, matrix: Exact, bias: Tensor | None) -> Tensor:
        """The exact linear layer; a large matrix is unpacked in blocks of rows."""
        n_numbers = matrix.n_rows * matrix.n_columns
        is_whole = n_numbers <= MOST_WHOLE
        products = []
        with self._lock:
            for first, last in [(0, matrix.n_rows)] if is_whole else row_blocks(matrix):
                shape = last - first, matrix.n_columns
                weight = self.memory(shape[0] * shape[1], x.dtype).view(shape)
                unpack(matrix, first, last, weight)
                some = None if bias is None else bias[first:last]
                products.append(F.linear(x, weight, some))
        return products[0] if is_whole else torch.cat(products, -1)


class PackedLinear(nn.Linear):
    """A linear layer that decodes with packed weights, and uses exact weights in all other passes.

    Args:
        packed: the weights for decoding.
        exact: the weights for all other passes: in memory, or unpacked into ``buffer``.
        bias: the bias of the layer, or None.
    """

    def __init__(
        self,
        packed: Packed | Part,
        exact: nn.Parameter | Exact,
        bias: nn.Parameter | None,
        buffer: Buffer,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = packed.n_columns, packed.n_rows
        self.packed = packed
        self._buffer = buffer
        self.exact: Exact | None = None
        self.register_parameter("bias", bias)
        self.register_parameter("weight", None)
        most_tokens = MOST_TOKENS
        if isinstance(exact, nn.Parameter):
            self.weight = exact
        else:
            self.exact, most_tokens = exact, MOST_TOKENS_UNPACKING
        self._most_numbers = most_tokens * self.in_features
        self._packed_from = self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        """Address and version of the weights in memory; None without such weights."""
        weight: Tensor | None = self.weight
        if weight is None:
            return None
        return weight.data_ptr(), -1 if weight.is_inference() else weight._version

    def is_current(self) -> bool:
        """Whether the packed weights still equal the weights in memory."""
        return self._packed_from == self._stamp()

    def packed_product(self, x: Tensor) -> Tensor:
        """(n, in_features) -> (n, out_features)."""
        product = self.packed.product(x)
        return product if self.bias is None else product.add_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if _decoding.active and x.numel() <= self._most_numbers:
            rows = self.packed_product(x.view(-1, self.in_features))
            return rows.view(*x.shape[:-1], self.out_features)
        if self.exact is None:
            return F.linear(x, self.weight, self.bias)
        return self._buffer.product(x, self.exact, self.bias)


class JoinedLinears:
    """Linear layers with the same input, such as q, k and v.

    They decode with one product if they are the parts of one matrix.
    """

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self._linears = linears
        self._whole: Packed | None = None
        parts = [each.packed for each in linears if isinstance(each.packed, Part)]
        if len(parts) == len(linears) and len({id(part.whole) for part in parts}) == 1:
            assert parts == sorted(parts, key=lambda part: part.first)
            self._whole = parts[0].whole

    def product(self, x: Tensor) -> Tensor:
        """(n, in_features) -> (n, sum of their out_features)."""
        if self._whole is None:
            return torch.cat([linear.packed_product(x) for linear in self._linears], 1)
        product: Tensor = self._whole.product(x)
        biases = tuple(each.bias for each in self._linears if each.bias is not None)
        return product.add_(torch.cat(biases)) if biases else product


class PackedEmbedding(nn.Module):
    """An embedding that reads the rows of its tokens from the file, where they are packed.

    weight: (0, columns), empty, with the dtype and device of the rows.
    """

    def __init__(self, exact: FileMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_type = 2.0  # as in a plain embedding, for the same digest of the model
        self.exact = exact
        self.weight = torch.empty(0, exact.n_columns, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) token ids -> (..., columns)."""
        found, where = torch.unique(ids, return_inverse=True)
        return self.exact.rows_at(found.tolist()).to(self.weight.dtype)[where]


def unpacked_of(module: nn.Module) -> Iterator[tuple[str, Exact]]:
    """The weights that are not parameters of the model, with the names of parameters."""
    for name, part in module.named_modules():
        if isinstance(part, PackedLinear | PackedEmbedding) and part.exact is not None:
            yield f"{name}.weight", part.exact


def pack_in_8_bits(hf: nn.Module) -> None:
    """Round the weights of a model's linear layers to 8 bits, with a scale for each row."""
    buffer = Buffer()
    for name, layer in list(hf.named_modules()):
        if type(layer) is nn.Linear:
            packed = Int8Matrix((layer.out_features, layer.in_features))
            for first, last in row_blocks(packed):
                packed.fill(first, layer.weight.detach()[first:last].float())
            hf.set_submodule(name, PackedLinear(packed, packed, layer.bias, buffer))

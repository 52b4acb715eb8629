"""The file of one chunk cache: where every byte sits, and writing it (`reader` reads it).

docs/format.md specifies the file. It is a valid safetensors file, written and read by us and not by
that library because the order of the tensors decides how few reads a request needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from samkv_integrations.chunk import FORMAT_VERSION, ChunkCache, Fingerprint
from samkv_integrations.layout import ChunkBlocks

KINDS = ("keys", "values")
PARTS = ("anchor", "middle")
INDEX = (
    "token_ids",
    "block_max",
    "block_min",
    "stable",
    "outliers",
    "local_query",
    "summary_codes",
    "summary_scale",
    "key_codes",
    "key_code_scale",
    "key_code_offset",
)
_DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """One tensor of the file: its bytes are ``[start, stop)``, counted from the header's end."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Where everything sits in the file of a chunk.

    Follows from these two fields alone, so that a reader derives it and believes nothing that a
    file says about itself.
    """

    fingerprint: Fingerprint
    n_tokens: int

    @cached_property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)

    @cached_property
    def tensors(self) -> dict[str, TensorPlace]:
        """The place of each tensor by name, in file order."""
        made_by, blocks, n_blocks = self.fingerprint, self.blocks, self.blocks.n_blocks
        n_middle = blocks.middle_blocks.stop - blocks.middle_blocks.start
        n_layers, n_groups, dim = made_by.n_layers, made_by.n_kv_heads, made_by.head_dim
        anchor = (made_by.torch_dtype, (n_layers, blocks.n_anchor, n_groups, dim))
        middle = (made_by.torch_dtype, (n_layers, blocks.n_middle, n_groups, dim))
        code_bytes = dim * made_by.code_bits // 8
        table = {
            "checksums": (torch.uint32, (1 + len(INDEX) + n_layers * n_blocks * len(KINDS),)),
            "token_ids": (torch.int32, (self.n_tokens,)),
            "block_max": (torch.int32, (n_layers,)),
            "block_min": (torch.int32, (n_layers,)),
            "stable": (torch.uint8, (n_layers,)),
            "outliers": (torch.uint8, (n_layers, self.n_tokens)),
            "local_query": (made_by.torch_dtype, (n_layers, made_by.n_heads, dim)),
            "summary_codes": (torch.int8, (n_layers, n_middle, n_groups, dim)),
            "summary_scale": (torch.float16, (n_layers, n_middle, n_groups)),
            "key_codes": (torch.uint8, (n_layers, self.n_tokens, n_groups, code_bytes)),
            "key_code_scale": (torch.float16, (n_layers, n_groups, dim)),
            "key_code_offset": (torch.float16, (n_layers, n_groups, dim)),
            "anchor_keys": anchor,
            "anchor_values": anchor,
            "middle_keys": middle,
            "middle_values": middle,
        }
        places, start = {}, 0
        for name, (dtype, shape) in table.items():
            stop = start + prod(shape) * dtype.itemsize
            places[name] = TensorPlace(dtype=dtype, shape=shape, start=start, stop=stop)
            start = stop
        return places

    @property
    def size(self) -> int:
        """Bytes of all tensors together, the header not counted."""
        return self.tensors["middle_values"].stop

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys (or the values) of one token at one layer."""
        made_by = self.fingerprint
        return made_by.n_kv_heads * made_by.head_dim * made_by.torch_dtype.itemsize

    @cached_property
    def block_places(self) -> list[tuple[int, int, int]]:
        """Of each block: which of `PARTS`, first byte within one layer of that part, bytes."""
        blocks, row, places = self.blocks, self.row_bytes, []
        for block in range(blocks.n_blocks):
            first, last = blocks.span(block)
            part = int(block in blocks.middle_blocks)
            if part:
                start = first - blocks.middle_start
            else:
                start = first if first < blocks.middle_stop else first - blocks.n_middle
            places.append((part, start * row, (last - first) * row))
        return places

    def block_range(self, layer: int, block: int, kind: str) -> tuple[int, int]:
        """First byte, and the one after the last, of one block's keys or values at one layer."""
        part, start, n_bytes = self.block_places[block]
        place = self.tensors[f"{PARTS[part]}_{kind}"]
        start += place.start + layer * place.shape[1] * self.row_bytes
        return start, start + n_bytes

    def header(self, key: str) -> bytes:
        """Everything before the tensors: the length, and the JSON padded to a multiple of 8."""
        fields = json.dumps(asdict(self.fingerprint), sort_keys=True, separators=(",", ":"))
        table: dict[str, object] = {
            "__metadata__": {
                "format_version": str(FORMAT_VERSION),
                "fingerprint": self.fingerprint.digest,
                "fingerprint_fields": fields,
                "key": key,
                "n_tokens": str(self.n_tokens),
            }
        }
        for name, place in self.tensors.items():
            table[name] = {
                "dtype": _DTYPE_NAMES[place.dtype],
                "shape": list(place.shape),
                "data_offsets": [place.start, place.stop],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def encode(chunk: ChunkCache) -> Iterator[bytes | memoryview]:
    """The bytes of the chunk's file, in order and in pieces, without copying keys or values."""
    layout = FileLayout(fingerprint=chunk.fingerprint, n_tokens=chunk.n_tokens)
    blocks, row = layout.blocks, layout.row_bytes
    layers = range(chunk.fingerprint.n_layers)
    index = {
        "token_ids": chunk.token_ids,
        "block_max": chunk.statistics.block_max,
        "block_min": chunk.statistics.block_min,
        "stable": chunk.statistics.stable.view(torch.uint8),
        "outliers": chunk.statistics.outliers.view(torch.uint8),
        "local_query": chunk.local_query,
        "summary_codes": chunk.summaries.codes,
        "summary_scale": chunk.summaries.scale,
        "key_codes": chunk.codes.codes,
        "key_code_scale": chunk.codes.scale,
        "key_code_offset": chunk.codes.offset,
    }
    for name, tensor in index.items():
        place = layout.tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (place.dtype, place.shape), name
    anchor = layout.tensors["anchor_keys"]
    shape = (anchor.shape[0], chunk.n_tokens, *anchor.shape[2:])
    for tensor in (chunk.keys, chunk.values):
        assert (tensor.dtype, tuple(tensor.shape)) == (anchor.dtype, shape), "keys or values"

    header = layout.header(chunk.key)
    index_bytes = [byte_view(index[name].detach().contiguous()) for name in INDEX]
    kinds = [byte_view(tensor.detach().contiguous()) for tensor in (chunk.keys, chunk.values)]

    def rows(kind: memoryview, layer: int, first: int, last: int) -> memoryview:
        start = layer * chunk.n_tokens
        return kind[(start + first) * row : (start + last) * row]

    checksums = [crc32(header), *map(crc32, index_bytes)]
    for layer in layers:
        for block in range(blocks.n_blocks):
            checksums += [crc32(rows(kind, layer, *blocks.span(block))) for kind in kinds]
    yield header
    yield struct.pack(f"<{len(checksums)}I", *checksums)
    yield from index_bytes
    anchors = [(0, blocks.middle_start), (blocks.middle_stop, chunk.n_tokens)]
    for spans in (anchors, [(blocks.middle_start, blocks.middle_stop)]):
        for kind in kinds:
            for layer in layers:
                yield from (rows(kind, layer, *span) for span in spans)


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes that can be read into."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.view(torch.uint8).numpy().data.cast("B")

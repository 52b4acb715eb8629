"""The file of one chunk cache: where every byte sits, and writing it (`chunk_file` reads it).

docs/format.md specifies the file. It is a valid safetensors file, written and read by us and not by
that library because the order of the tensors decides how few reads a request needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from samkv_integrations.cache.chunk import FORMAT_VERSION, ChunkBlocks, ChunkCache, Fingerprint

INDEX = (
    "token_ids",
    "block_max",
    "block_min",
    "stable",
    "outliers",
    "text",
    "local_query",
    "summary_codes",
    "summary_scale",
    "key_range",
)
MAC_BYTES = 16
_FILE_PURPOSE = b"samkv file"  # the secret names chunks too, by hashes without a purpose

_DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
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

    Follows from these fields alone, so that a reader derives it and believes nothing that a file
    says about itself.

    n_text: bytes of the chunk's text, see `text_bytes`.
    """

    fingerprint: Fingerprint
    n_tokens: int
    namespace: str
    n_text: int

    @classmethod
    def of(cls, chunk: ChunkCache, namespace: str) -> FileLayout:
        """Where everything of ``chunk`` sits."""
        return cls(
            fingerprint=chunk.fingerprint, n_tokens=chunk.n_tokens, namespace=namespace,
            n_text=len(text_bytes(chunk.text)),
        )  # fmt: skip

    @cached_property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)

    @cached_property
    def tensors(self) -> dict[str, TensorPlace]:
        """The place of each tensor by name, in file order."""
        made_by, blocks, n_blocks = self.fingerprint, self.blocks, self.blocks.n_blocks
        n_middle = blocks.middle_blocks.stop - blocks.middle_blocks.start
        n_layers, n_groups, dim = made_by.n_layers, made_by.n_kv_heads, made_by.head_dim
        entries = made_by.entry_format
        table = {
            "macs": (torch.uint8, (1 + len(INDEX) + n_layers * n_blocks, MAC_BYTES)),
            "token_ids": (torch.int32, (self.n_tokens,)),
            "block_max": (torch.int32, (n_layers,)),
            "block_min": (torch.int32, (n_layers,)),
            "stable": (torch.uint8, (n_layers,)),
            "outliers": (torch.uint8, (n_layers, self.n_tokens)),
            "text": (torch.uint8, (self.n_text,)),
            "local_query": (made_by.torch_dtype, (n_layers, made_by.n_heads, dim)),
            "summary_codes": (torch.int8, (n_layers, n_middle, n_groups, dim)),
            "summary_scale": (torch.float16, (n_layers, n_middle, n_groups)),
            "key_range": (torch.float16, (n_layers, *entries.range_shape(self.n_tokens))),
            "entries": (torch.uint8, (n_layers, self.n_tokens, entries.n_bytes)),
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
        return self.tensors["entries"].stop

    def file_size(self, key: str) -> int:
        """Bytes of the file: of the header, and of all tensors together."""
        return len(self.header(key)) + self.size

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the entries of one layer."""
        return self.n_tokens * self.fingerprint.entry_format.n_bytes

    @cached_property
    def block_places(self) -> list[tuple[int, int]]:
        """Of each block: its first byte within the entries of a layer, and its bytes."""
        n_bytes = self.fingerprint.entry_format.n_bytes
        spans = map(self.blocks.span, range(self.blocks.n_blocks))
        return [(first * n_bytes, (last - first) * n_bytes) for first, last in spans]

    def header(self, key: str) -> bytes:
        """Everything before the tensors: the length, and the JSON padded to a multiple of 8."""
        fields = json.dumps(asdict(self.fingerprint), sort_keys=True, separators=(",", ":"))
        table: dict[str, object] = {
            "__metadata__": {
                "format_version": str(FORMAT_VERSION),
                "fingerprint": self.fingerprint.digest,
                "fingerprint_fields": fields,
                "key": key,
                "namespace": self.namespace,
                "n_tokens": str(self.n_tokens),
                "n_text": str(self.n_text),
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


def text_bytes(text: str) -> bytes:
    """A text as files hold it: UTF-8, and lone surrogates as three bytes each."""
    return text.encode(errors="surrogatepass")


def file_key(header: bytes, secret: bytes) -> bytes:
    """What the regions of the file with this header are authenticated with.

    It follows from the whole header, and so from the chunk's key, namespace and fingerprint: a
    region is of no use in another file.
    """
    return blake2b(header, key=secret, digest_size=32, person=_FILE_PURPOSE).digest()


def mac(key: bytes, position: int, data: bytes | memoryview) -> bytes:
    """The MAC of region ``position`` of a file; key: see `file_key`."""
    salt = position.to_bytes(16, "little")
    return blake2b(data, key=key, digest_size=MAC_BYTES, salt=salt).digest()


def encode(chunk: ChunkCache, namespace: str, secret: bytes) -> Iterator[bytes | memoryview]:
    """The bytes of the chunk's file, in order and in pieces, without copying the entries.

    secret: of the store, which makes its files known from all others.
    """
    layout = FileLayout.of(chunk, namespace)
    text = torch.empty(layout.n_text, dtype=torch.uint8)
    byte_view(text)[:] = text_bytes(chunk.text)
    tensors = {
        "token_ids": chunk.token_ids,
        "block_max": chunk.statistics.block_max,
        "block_min": chunk.statistics.block_min,
        "stable": chunk.statistics.stable.view(torch.uint8),
        "outliers": chunk.statistics.outliers.view(torch.uint8),
        "text": text,
        "local_query": chunk.local_query,
        "summary_codes": chunk.block_means.codes,
        "summary_scale": chunk.block_means.scale,
        "key_range": chunk.key_range,
        "entries": chunk.entries,
    }
    for name, tensor in tensors.items():
        place = layout.tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (place.dtype, place.shape), name

    header = layout.header(chunk.key)
    key = file_key(header, secret)
    *index, entries = (byte_view(tensor.detach().contiguous()) for tensor in tensors.values())
    regions: list[bytes | memoryview] = [header, *index]
    for start in range(0, len(entries), layout.layer_bytes):
        regions += [
            entries[start + first : start + first + n_bytes]
            for first, n_bytes in layout.block_places
        ]
    yield header
    yield b"".join([mac(key, position, data) for position, data in enumerate(regions)])
    yield from index
    yield entries


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes that can be read into."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.view(torch.uint8).numpy().data.cast("B")

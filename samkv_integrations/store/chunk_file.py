"""The file of one chunk cache: its layout, writing and reading. docs/format.md specifies it.

It is a valid safetensors file. It is written here and not by that library, because the order of the
tensors decides how many reads a request needs.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from ctypes import c_ubyte
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from hmac import compare_digest
from io import FileIO
from math import prod
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from samkv_integrations.chunks.chunk import (
    FORMAT_VERSION,
    BlockMeans,
    ChunkBlocks,
    ChunkCache,
    ChunkStatistics,
    Fingerprint,
)
from samkv_integrations.errors import CacheMiss

INDEX = (
    "token_ids", "block_max", "block_min", "stable", "outliers", "text", "local_query",
    "summary_codes", "summary_scale", "key_range",
)  # fmt: skip
"""Tensors before the entries, in file order; each is a region with a MAC."""

MAC_BYTES = 16
_FIRST_BLOCK = 1 + len(INDEX)  # number of the region
_FILE_PURPOSE = b"samkv file"  # tells these hashes from those of keys, with the same secret

_DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """A tensor of the file; its bytes are ``[start, stop)``, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """The layout of a chunk's file.

    It follows from these fields alone: a reader computes it, rather than trust the file's table.

    n_text: bytes of the chunk's text, see `text_bytes`.
    """

    fingerprint: Fingerprint
    n_tokens: int
    namespace: str
    n_text: int

    @classmethod
    def of(cls, fingerprint: Fingerprint, n_tokens: int, namespace: str, text: str) -> FileLayout:
        """The layout of the file of a chunk with this text."""
        return cls(
            fingerprint=fingerprint, n_tokens=n_tokens, namespace=namespace,
            n_text=len(text_bytes(text)),
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
            "macs": (torch.uint8, (_FIRST_BLOCK + n_layers * (n_blocks + 1), MAC_BYTES)),
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
        """Bytes of all tensors together, without the header."""
        return self.tensors["entries"].stop

    def file_size(self, key: str) -> int:
        """Bytes of the file."""
        return len(self.header(key)) + self.size

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the entries of one layer."""
        return self.n_tokens * self.fingerprint.entry_format.n_bytes

    @cached_property
    def block_places(self) -> list[tuple[int, int]]:
        """For each block: offset in the entries of a layer, and length, in bytes."""
        n_bytes = self.fingerprint.entry_format.n_bytes
        spans = map(self.blocks.span, range(self.blocks.n_blocks))
        return [(first * n_bytes, (last - first) * n_bytes) for first, last in spans]

    def header(self, key: str) -> bytes:
        """The bytes before the tensors: length, and JSON padded to a multiple of 8 bytes."""
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
    """A text as UTF-8; a lone surrogate is three bytes."""
    return text.encode(errors="surrogatepass")


def file_key(header: bytes, secret: bytes) -> bytes:
    """The MAC key of the file with this header.

    It depends on the whole header, and so on the chunk's key, namespace and fingerprint: a region
    of another file fails.
    """
    return blake2b(header, key=secret, digest_size=32, person=_FILE_PURPOSE).digest()


def mac(key: bytes, position: int, data: bytes | memoryview) -> bytes:
    """The MAC of region ``position`` of a file; key: see `file_key`."""
    hasher = blake3(position.to_bytes(8, "little"), key=key)
    hasher.update(data)
    return hasher.digest(length=MAC_BYTES)


def encode(chunk: ChunkCache, namespace: str, secret: bytes) -> Iterator[bytes | memoryview]:
    """The bytes of a chunk's file, in pieces, without copying the entries.

    secret: of the store; the MACs are keyed with it.
    """
    layout = FileLayout.of(chunk.fingerprint, chunk.n_tokens, namespace, chunk.text)
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
    regions: list[bytes | memoryview] = [header, *index, *_block_regions(layout, entries)]
    # whole layers too: a reader of all entries checks one MAC per layer, not one per block
    regions += [
        entries[start : start + layout.layer_bytes]
        for start in range(0, len(entries), layout.layer_bytes)
    ]
    yield header
    yield b"".join([mac(key, position, data) for position, data in enumerate(regions)])
    yield from index
    yield entries


def _block_regions(layout: FileLayout, entries: memoryview) -> list[memoryview]:
    """The entries of each block of each layer. entries: of all layers."""
    return [
        entries[start + first : start + first + n_bytes]
        for start in range(0, len(entries), layout.layer_bytes)
        for first, n_bytes in layout.block_places
    ]


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes that can be read into.

    NumPy gives the same, in three operations of torch.
    """
    if not tensor.numel():
        return memoryview(bytearray())
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    memory = (c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # frees the memory with the last view
    return memoryview(memory).cast("B")


# -- reading --------------------------------------------------------------------------------------

MAX_HEADER_BYTES = 1 << 20
BAD_JSON = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What parsing untrusted JSON, and looking up fields in it, may raise."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_VIEWS = 1024  # buffers of one read: IOV_MAX of Linux and macOS
# Tensors that are read together, in file order.
_STATISTICS = ("block_max", "block_min", "stable", "outliers")


class NotAFile(OSError):
    """A link, folder, pipe, socket or device where a file should be."""


def open_regular(path: Path, *, follows_links: bool = False) -> FileIO:
    """Open a regular file for reading: no pipe, which could block.

    follows_links: whether ``path`` may be a link. Raises OSError; `NotAFile` if it is something
    else.
    """
    if not stat.S_ISREG(os.stat(path, follow_symlinks=follows_links).st_mode):
        raise NotAFile(errno.EINVAL, f"{path.name} is no regular file")
    return FileIO(os.open(path, _FLAGS | (0 if follows_links else os.O_NOFOLLOW)))


def _identity(file: FileIO) -> tuple[int, int, int, int]:
    """Device, inode, size and time of the last change: whoever changes a file changes one."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


class ChunkFile:
    """A chunk file, opened; a `StoredChunk` that reads and checks only what is asked for.

    Opening verifies format version, fingerprint, key, namespace, file size, and the MACs of header,
    token ids and statistics. Other regions are checked when they are read. Whatever is
    wrong raises `CacheMiss`.

    Args:
        key, fingerprint, namespace: what the file must hold; None to take it from the file.
        secret: of the store that wrote the file.
    """

    def __init__(
        self, path: Path, key: str | None = None, fingerprint: Fingerprint | None = None, *,
        namespace: str | None = None, secret: bytes,
    ) -> None:  # fmt: skip
        self.bytes_read = 0
        self._path, self._secret = path, secret
        self._tensors: dict[str, Tensor] = {}
        self._macs = b""
        self._let_go = False
        self._file = self._open()
        try:
            self._opened = _identity(self._file)
            layout = self.layout = self._read_layout(key, fingerprint, namespace)
            self.fingerprint = fingerprint or layout.fingerprint
            self.n_tokens, self.blocks = layout.n_tokens, layout.blocks
            rest = bytearray((layout.tensors["macs"].shape[0] - 1) * MAC_BYTES)
            self._read(MAC_BYTES, memoryview(rest))
            self._macs += bytes(rest)
            self.token_ids, *_ = self._read_index("token_ids", *_STATISTICS)
        except BaseException:
            self.close()
            raise

    def _open(self) -> FileIO:
        try:
            return open_regular(self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheMiss("absent", str(self._path)) from error
        except NotAFile as error:
            raise self._corrupt("not a regular file") from error
        except OSError as error:
            raise CacheMiss("io", f"{self._path}: {error}") from error

    def _read_layout(
        self, key: str | None, fingerprint: Fingerprint | None, namespace: str | None
    ) -> FileLayout:
        """The layout. Nothing in the header is used before its MAC was checked."""
        _, _, size, _ = self._opened
        prefix = bytearray(8)
        self._fill(0, [memoryview(prefix)])
        n_bytes = int.from_bytes(prefix, "little")
        if n_bytes > min(MAX_HEADER_BYTES, size - len(prefix) - MAC_BYTES):
            raise self._corrupt("header length")
        text, own_mac = bytearray(n_bytes), bytearray(MAC_BYTES)
        self._fill(len(prefix), [memoryview(text), memoryview(own_mac)])
        self._header, self._macs = bytes(prefix + text), bytes(own_mac)
        self._mac_key = file_key(self._header, self._secret)
        try:
            said = json.loads(text)["__metadata__"]
            version = said["format_version"]
        except BAD_JSON as error:
            raise self._corrupt("header") from error
        if isinstance(version, str) and version != str(FORMAT_VERSION):
            detail = f"file of version {version[:20]}, this release reads {FORMAT_VERSION}"
            raise CacheMiss("format", f"{self._path}: {detail}")
        self._check([self._header], [0], "header")
        # The MAC is right, so this code has written the header.
        self.key = said["key"]
        layout = FileLayout(
            fingerprint=Fingerprint(**json.loads(said["fingerprint_fields"])),
            n_tokens=int(said["n_tokens"]), n_text=int(said["n_text"]), namespace=said["namespace"],
        )  # fmt: skip
        if size != len(self._header) + layout.size:
            raise self._corrupt("file size")
        if fingerprint is not None and (found := layout.fingerprint.digest) != fingerprint.digest:
            raise CacheMiss("fingerprint", f"{self._path}: {found}")
        if key not in (None, self.key):
            raise CacheMiss("fingerprint", f"{self._path}: holds chunk {self.key}")
        if namespace not in (None, layout.namespace):
            raise self._corrupt("namespace")
        return layout

    def _read(self, start: int, *views: memoryview) -> None:
        """Fill the views, one after the other. start: counted from the end of the header."""
        if not self._let_go:
            assert not self._file.closed, "closed"
            self._fill(len(self._header) + start, views)
            return
        self._file = self._open()  # the header is known, and each region has its MAC
        with self._file:
            if _identity(self._file)[:3] != self._opened[:3]:  # its time, such as by a new link
                raise CacheMiss("absent", f"{self._path} was replaced")
            self._fill(len(self._header) + start, views)

    def _fill(self, offset: int, views: Sequence[memoryview]) -> None:
        left = [view for view in views if len(view)]
        while left:
            try:
                got = os.preadv(self._file.fileno(), left[:_MAX_VIEWS], offset)
            except OSError as error:
                raise CacheMiss("io", f"{self._path}: {error}") from error
            if not got:
                raise self._corrupt("too short")
            self.bytes_read += got
            offset += got
            # A read may be cut short: beyond 2 GiB, or beyond the most views.
            while got and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def _check(
        self, regions: Sequence[bytes | memoryview], positions: Sequence[int], what: str
    ) -> None:
        """Check the MACs of regions. positions: their numbers."""
        key, macs = self._mac_key, self._macs
        found = [mac(key, i, data) for i, data in zip(positions, regions, strict=True)]
        expected = [macs[i * MAC_BYTES : (i + 1) * MAC_BYTES] for i in positions]
        if not compare_digest(b"".join(found), b"".join(expected)):
            raise self._corrupt(what)

    def _corrupt(self, what: str) -> CacheMiss:
        return CacheMiss("corrupt", f"{self._path}: {what}")

    def _read_index(self, *names: str) -> list[Tensor]:
        """Tensors that are neighbours in the file, read together, checked, and kept."""
        if names[-1] not in self._tensors:
            places = [self.layout.tensors[name] for name in names]
            tensors = [torch.empty(place.shape, dtype=place.dtype) for place in places]
            views = [byte_view(tensor) for tensor in tensors]
            self._read(places[0].start, *views)
            for name, view in zip(names, views, strict=True):
                self._check([view], [1 + INDEX.index(name)], name)
            self._tensors.update(zip(names, tensors, strict=True))
        return [self._tensors[name] for name in names]

    def statistics(self) -> ChunkStatistics:
        block_max, block_min, stable, outliers = self._read_index(*_STATISTICS)
        return ChunkStatistics(
            block_max=block_max, block_min=block_min,
            outliers=outliers.view(torch.bool), stable=stable.view(torch.bool),
        )  # fmt: skip

    def text(self) -> str:
        return bytes(byte_view(self._read_index("text")[0])).decode(errors="surrogatepass")

    def local_query(self) -> Tensor:
        return self._read_index("local_query")[0]

    def block_means(self) -> BlockMeans:
        codes, scale = self._read_index("summary_codes", "summary_scale")
        return BlockMeans(codes=codes, scale=scale)

    def key_range(self) -> Tensor:
        return self._read_index("key_range")[0]

    def read_layers(self, first: int, out: Sequence[Tensor]) -> None:
        layout = self.layout
        n_layers, *shape = layout.tensors["entries"].shape
        assert first >= 0 and first + len(out) <= n_layers
        assert all((o.dtype, list(o.shape)) == (torch.uint8, shape) for o in out)
        assert all(o.is_contiguous() for o in out)
        self.key_range()
        layers = [byte_view(layer) for layer in out]
        self._read(layout.tensors["entries"].start + first * layout.layer_bytes, *layers)
        before = _FIRST_BLOCK + n_layers * len(layout.block_places) + first
        self._check(layers, range(before, before + len(layers)), "layer")

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        # Called thousands of times per request, so there is no tensor operation in a loop.
        layout = self.layout
        assert 0 <= layer < layout.fingerprint.n_layers and min(blocks, default=0) >= 0
        assert out.dtype == torch.uint8
        places, view = layout.block_places, byte_view(out)
        base = layout.tensors["entries"].start + layer * layout.layer_bytes
        runs: list[list[int]] = []  # adjacent blocks: offset in the file, and range of `view`
        regions: list[tuple[int, int]] = []
        done = end = 0
        for block in blocks:
            start, n_bytes = places[block]
            if base + start != end:
                end = base + start
                runs.append([end, done, done])
            regions.append((done, done + n_bytes))
            end += n_bytes
            done += n_bytes
            runs[-1][2] = done
        assert done == len(view), "the tensor must hold exactly the entries of the blocks"
        for offset, first, last in runs:
            self._read(offset, view[first:last])
        of_layer = _FIRST_BLOCK + layer * len(places)
        positions = [of_layer + block for block in blocks]
        self._check([view[first:last] for first, last in regions], positions, "block")

    def chunk(self, entries: Tensor | None = None) -> ChunkCache:
        """See `StoredChunk.chunk`. entries: (L, T, E), if `read_layers` has read them already."""
        if entries is None:
            place = self.layout.tensors["entries"]
            entries = torch.empty(place.shape, dtype=place.dtype)
            self.read_layers(0, list(entries))
        return ChunkCache(
            key=self.key, fingerprint=self.layout.fingerprint, text=self.text(),
            token_ids=self.token_ids, entries=entries, key_range=self.key_range(),
            local_query=self.local_query(), statistics=self.statistics(),
            block_means=self.block_means(),
        )  # fmt: skip

    def verify(self) -> None:
        regions = _block_regions(self.layout, byte_view(self.chunk().entries))
        self._check(regions, range(_FIRST_BLOCK, _FIRST_BLOCK + len(regions)), "block")

    def is_current(self) -> bool:
        """Whether the file is still there, unchanged; it may be closed. Nothing is read."""
        try:  # opened, as network file systems may show a deleted file for some seconds
            with open_regular(self._path) as file:
                return _identity(file) == self._opened
        except OSError:
            return False

    @property
    def modified_at(self) -> float:
        """When the file was written or touched last, in seconds since 1970."""
        return os.fstat(self._file.fileno()).st_mtime

    def let_go(self) -> None:
        """Open the file anew for each read, and close it afterwards."""
        self._let_go = True
        self._file.close()

    def close(self) -> None:
        self._file.close()
        self._let_go = False

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

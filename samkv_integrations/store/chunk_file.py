"""The file of one chunk cache: its layout, writing and reading. docs/format.md specifies it.

It is a valid safetensors file. It is written here and not by that library, because the order of the
arrays decides how many reads a request needs.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from hmac import compare_digest
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import (
    FORMAT_VERSION,
    ArrayKind,
    CacheArray,
    CacheShape,
    ChunkBlocks,
    ChunkCache,
    Fingerprint,
)

MAC_BYTES = 16
_FILE_PURPOSE = b"samkv file"  # makes these hashes differ from those of keys, with the same secret


class ArrayPlace(NamedTuple):
    """An array of the file; its bytes are ``[start, stop)``, counted from the end of the header."""

    kind: ArrayKind
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """The layout of a chunk's file.

    n_text: bytes of the chunk's text, see `text_bytes`. shape: the arrays of its cache.
    """

    fingerprint: Fingerprint
    n_tokens: int
    namespace: str
    n_text: int
    shape: CacheShape

    @classmethod
    def of(
        cls, fingerprint: Fingerprint, n_tokens: int, namespace: str, text: str, shape: CacheShape
    ) -> FileLayout:
        """The layout of the file of a chunk with this text."""
        return cls(
            fingerprint=fingerprint, n_tokens=n_tokens, namespace=namespace,
            n_text=len(text_bytes(text)), shape=shape,
        )  # fmt: skip

    @classmethod
    def of_cache(cls, chunk: ChunkCache, namespace: str) -> FileLayout:
        """The layout of the file of a cache."""
        return cls.of(chunk.fingerprint, chunk.n_tokens, namespace, chunk.text, chunk.shape)

    @cached_property
    def blocks(self) -> ChunkBlocks:
        return self.fingerprint.scheme.of(self.n_tokens)

    @cached_property
    def index(self) -> tuple[str, ...]:
        """The arrays between MACs and entries, in file order; each is a region with a MAC."""
        return ("token_ids", *self.shape.at_opening, "text", *self.shape.on_demand)

    @property
    def first_block(self) -> int:
        """The number of the region that holds the first block's entries."""
        return 1 + len(self.index)

    @cached_property
    def arrays(self) -> dict[str, ArrayPlace]:
        """The place of each array by name, in file order."""
        n_regions = self.first_block + self.shape.entries[0] * (self.blocks.n_blocks + 1)
        kinds = {
            "macs": ArrayKind(dtype="U8", shape=(n_regions, MAC_BYTES)),
            "token_ids": ArrayKind(dtype="I32", shape=(self.n_tokens,)),
            **self.shape.at_opening,
            "text": ArrayKind(dtype="U8", shape=(self.n_text,)),
            **self.shape.on_demand,
            "entries": ArrayKind(dtype="U8", shape=self.shape.entries),
        }
        places, start = {}, 0
        for name, kind in kinds.items():
            places[name] = ArrayPlace(kind, start, start + kind.n_bytes)
            start = places[name].stop
        return places

    @property
    def size(self) -> int:
        """Bytes of all arrays together, without the header."""
        return self.arrays["entries"].stop

    def file_size(self, key: str) -> int:
        """Bytes of the file."""
        return len(self.header(key)) + self.size

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the entries of one layer."""
        return self.n_tokens * self.shape.entries[2]

    @cached_property
    def block_places(self) -> list[tuple[int, int]]:
        """For each block: offset in the entries of a layer, and length, in bytes."""
        n_bytes = self.shape.entries[2]
        spans = map(self.blocks.span, range(self.blocks.n_blocks))
        return [(first * n_bytes, (last - first) * n_bytes) for first, last in spans]

    def header(self, key: str) -> bytes:
        """The bytes before the arrays: length, and JSON padded to a multiple of 8 bytes."""
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
        for name, place in self.arrays.items():
            table[name] = {
                "dtype": place.kind.dtype,
                "shape": list(place.kind.shape),
                "data_offsets": [place.start, place.stop],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def layout_in(header: Mapping[str, Any]) -> FileLayout:
    """The layout that the JSON of a file describes, whose MAC was verified.

    Raises one of `BAD_JSON` if the arrays leave holes, are in another order than in every file, or
    do not fit the chunk.
    """
    table = dict(header)
    said = table.pop("__metadata__")
    kinds = {name: ArrayKind(a["dtype"], tuple(map(int, a["shape"]))) for name, a in table.items()}
    names = list(kinds)
    if names[:2] != ["macs", "token_ids"] or names[-1] != "entries":
        raise ValueError("arrays in another order")
    at, (n_layers, n_tokens, n_bytes) = names.index("text"), kinds["entries"].shape
    layout = FileLayout(
        fingerprint=Fingerprint(**json.loads(said["fingerprint_fields"])),
        n_tokens=int(said["n_tokens"]), n_text=int(said["n_text"]), namespace=said["namespace"],
        shape=CacheShape(
            at_opening={name: kinds[name] for name in names[2:at]},
            on_demand={name: kinds[name] for name in names[at + 1 : -1]},
            entries=(n_layers, n_tokens, n_bytes),
        ),
    )  # fmt: skip
    if n_tokens != layout.n_tokens or n_layers != layout.fingerprint.n_layers:
        raise ValueError("entries of another shape")
    for name, place in layout.arrays.items():
        is_there = table[name]["data_offsets"] == [place.start, place.stop]
        if not is_there or kinds[name] != place.kind or min(place.kind.shape, default=0) < 0:
            raise ValueError(f"{name} in another place or of another shape")
    return layout


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
    layout = FileLayout.of_cache(chunk, namespace)
    entries = byte_view(np.ascontiguousarray(chunk.entries))
    content = {
        "token_ids": byte_view(np.ascontiguousarray(chunk.token_ids)),
        "text": memoryview(text_bytes(chunk.text)),
        "entries": entries,
    }
    for name, array in (*chunk.at_opening.items(), *chunk.on_demand.items()):
        content[name] = byte_view(array.data)
    for name, data in content.items():
        assert len(data) == layout.arrays[name].kind.n_bytes, name

    header = layout.header(chunk.key)
    key = file_key(header, secret)
    index = [content[name] for name in layout.index]
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


def byte_view(array: NDArray[Any]) -> memoryview:
    """The memory of a contiguous array, as bytes that can be read into."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data


# -- reading --------------------------------------------------------------------------------------

MAX_HEADER_BYTES = 1 << 20
BAD_JSON = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What parsing untrusted JSON, and looking up fields in it, may raise."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_VIEWS = 1024  # buffers of one read: IOV_MAX of Linux and macOS


class NotAFile(OSError):
    """A link, folder, pipe, socket or device where a file should be."""


def open_regular(path: Path, *, follows_links: bool = False) -> FileIO:
    """Open a file for reading, which must be regular, because a pipe could block.

    follows_links: whether ``path`` may be a link. Raises OSError; `NotAFile` if it is not a regular
    file.
    """
    if not stat.S_ISREG(os.stat(path, follow_symlinks=follows_links).st_mode):
        raise NotAFile(errno.EINVAL, f"{path.name} is not a regular file")
    return FileIO(os.open(path, _FLAGS | (0 if follows_links else os.O_NOFOLLOW)))


def _identity(file: FileIO) -> tuple[int, int, int, int]:
    """Device, inode, size and time of the last change: each change of a file changes one."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


class ChunkFile(StoredChunk):
    """An opened chunk file, of which only requested regions are read and checked.

    Opening verifies format version, fingerprint, key, namespace, file size, and the MACs of header,
    token ids and the arrays that are read at opening. Other regions are checked when they are read.
    Every mistake raises `CacheMiss`.

    Args:
        key, fingerprint, namespace: what the file must have; None to take it from the file.
        secret: of the store that wrote the file.
    """

    def __init__(
        self, path: Path, key: str | None = None, fingerprint: Fingerprint | None = None, *,
        namespace: str | None = None, secret: bytes,
    ) -> None:  # fmt: skip
        self.bytes_read = 0
        self._path, self._secret = path, secret
        self._arrays: dict[str, CacheArray] = {}
        self._macs = b""
        self._let_go = False
        self._file = self._open()
        try:
            self._opened = _identity(self._file)
            layout = self.layout = self._read_layout(key, fingerprint, namespace)
            self.fingerprint, self.shape = fingerprint or layout.fingerprint, layout.shape
            self.n_tokens, self.blocks, self.size = layout.n_tokens, layout.blocks, layout.size
            rest = bytearray(layout.arrays["macs"].stop - MAC_BYTES)
            self._read(MAC_BYTES, memoryview(rest))
            self._macs += bytes(rest)
            self._read_arrays("token_ids", *layout.shape.at_opening)
            self.token_ids = self._arrays["token_ids"].data.view("<i4")
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
            table = json.loads(text)
            said = table["__metadata__"]
            version = said["format_version"]
        except BAD_JSON as error:
            raise self._corrupt("header") from error
        if isinstance(version, str) and version != str(FORMAT_VERSION):
            detail = f"file of version {version[:20]}, this release reads {FORMAT_VERSION}"
            raise CacheMiss("format", f"{self._path}: {detail}")
        self._check([self._header], [0], "header")
        try:
            self.key, layout = str(said["key"]), layout_in(table)
        except BAD_JSON as error:
            raise self._corrupt(f"header ({error})") from error
        if size != len(self._header) + layout.size:
            raise self._corrupt("file size")
        found = layout.fingerprint
        if fingerprint not in (None, found) and fingerprint.digest != found.digest:
            raise CacheMiss("fingerprint", f"{self._path}: {found.digest}")
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
            if _identity(self._file)[:3] != self._opened[:3]:  # not ctime: a new link changes it
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

    def _read_arrays(self, *names: str) -> None:
        """Read arrays that are neighbours in the file together; check and keep them."""
        layout = self.layout
        read = [np.empty(layout.arrays[name].kind.n_bytes, np.uint8) for name in names]
        views, first = [byte_view(data) for data in read], 1 + layout.index.index(names[0])
        self._read(layout.arrays[names[0]].start, *views)
        self._check(views, range(first, first + len(views)), ", ".join(names))
        for name, data in zip(names, read, strict=True):
            self._arrays[name] = CacheArray(kind=layout.arrays[name].kind, data=data)

    def array(self, name: str) -> CacheArray:
        if name not in self._arrays:
            self._read_arrays(name)
        return self._arrays[name]

    def text(self) -> str:
        return self.array("text").data.tobytes().decode(errors="surrogatepass")

    def read_layers(self, first: int, out: Sequence[NDArray[np.uint8]]) -> None:
        layout = self.layout
        n_layers, *shape = layout.shape.entries
        assert first >= 0 and first + len(out) <= n_layers
        assert all(o.dtype == np.uint8 and list(o.shape) == shape for o in out)
        layers = [byte_view(layer) for layer in out]
        self._read(layout.arrays["entries"].start + first * layout.layer_bytes, *layers)
        before = layout.first_block + n_layers * len(layout.block_places) + first
        self._check(layers, range(before, before + len(layers)), "layer")

    def read_blocks(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        layout = self.layout
        assert 0 <= layer < layout.shape.entries[0] and min(blocks, default=0) >= 0
        assert out.dtype == np.uint8
        places, view = layout.block_places, byte_view(out)
        base = layout.arrays["entries"].start + layer * layout.layer_bytes
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
        assert done == len(view), "it must hold exactly the entries of the blocks"
        for offset, first, last in runs:
            self._read(offset, view[first:last])
        of_layer = layout.first_block + layer * len(places)
        positions = [of_layer + block for block in blocks]
        self._check([view[first:last] for first, last in regions], positions, "block")

    def chunk(self, entries: NDArray[np.uint8] | None = None) -> ChunkCache:
        shape = self.layout.shape
        if entries is None:
            entries = np.empty(shape.entries, np.uint8)
            self.read_layers(0, list(entries))
        return ChunkCache(
            key=self.key, fingerprint=self.layout.fingerprint, text=self.text(),
            token_ids=self.token_ids, entries=entries,
            at_opening={name: self.array(name) for name in shape.at_opening},
            on_demand={name: self.array(name) for name in shape.on_demand},
        )  # fmt: skip

    def verify(self) -> None:
        regions = _block_regions(self.layout, byte_view(self.chunk().entries))
        first = self.layout.first_block
        self._check(regions, range(first, first + len(regions)), "block")

    def is_current(self) -> bool:
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

"""Reading the file of one chunk cache (`file_format` says what it holds)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from samkv_integrations.cache.chunk import BlockMeans, ChunkStatistics
from samkv_integrations.cache.file_format import INDEX, FileLayout, byte_view
from samkv_integrations.cache.fingerprint import FORMAT_VERSION, Fingerprint
from samkv_integrations.cache.quantise import is_sound
from samkv_integrations.errors import CacheMiss

# Tensors that are read together, in file order.
_STATISTICS = ("block_max", "block_min", "stable", "outliers")
_LOCAL_QUERY = ("local_query",)
_SUMMARIES = ("summary_codes", "summary_scale")
_KEY_RANGE = ("key_range",)
MAX_HEADER_BYTES = 1 << 20
_MAX_VIEWS = 1024  # of one read: IOV_MAX of Linux and macOS


class ChunkFile:
    """An open chunk file, which reads and checks only what is asked for.

    Opening verifies identity: format version, fingerprint, key, table, file size, and the checksums
    of the header, the token ids and the statistics. The rest is checked when it is read. Whatever
    is wrong raises `CacheMiss`.
    """

    def __init__(self, path: Path, key: str, fingerprint: Fingerprint) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.bytes_read = 0
        self._path = path
        self._groups: dict[tuple[str, ...], list[Tensor]] = {}
        try:
            self._file = open(path, "rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheMiss("absent", str(path)) from error
        except OSError as error:
            raise CacheMiss("io", f"{path}: {error}") from error
        self._fd = self._file.fileno()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        header, self._layout = self._read_header()
        layout, self._data_start = self._layout, len(header)
        self.n_tokens, self.blocks = layout.n_tokens, layout.blocks
        checksums = bytearray(layout.tensors["checksums"].stop)
        self._read(self._data_start, memoryview(checksums))
        self._checksums = memoryview(checksums).cast("I")
        self._check(header, 0, "header")
        self.token_ids, *self._groups[_STATISTICS] = self._read_index(("token_ids", *_STATISTICS))
        self._entries_start = self._data_start + layout.tensors["entries"].start

    def _read_header(self) -> tuple[bytes, FileLayout]:
        size = os.fstat(self._fd).st_size
        prefix = bytearray(8)
        self._read(0, memoryview(prefix))
        n_bytes = int.from_bytes(prefix, "little")
        if n_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise self._corrupt("header length")
        text = bytearray(n_bytes)
        self._read(8, memoryview(text))
        header = bytes(prefix + text)
        try:
            metadata = json.loads(text)["__metadata__"]
            version, digest, key = (metadata[k] for k in ("format_version", "fingerprint", "key"))
            model = json.loads(metadata["fingerprint_fields"])["model"]
            n_tokens = int(metadata["n_tokens"])
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise self._corrupt("header") from error
        if version != str(FORMAT_VERSION):
            raise CacheMiss("format", f"{self._path}: version {version}, not {FORMAT_VERSION}")
        if digest != self.fingerprint.digest:
            raise CacheMiss("fingerprint", f"{self._path}: {digest}")
        if key != self.key:
            raise CacheMiss("tokens", f"{self._path}: holds chunk {key}")
        # The label of the model is the one field that may differ between equal fingerprints.
        written_by = replace(self.fingerprint, model=model)
        layout = FileLayout(fingerprint=written_by, n_tokens=n_tokens)
        if n_tokens < 1 or size != len(header) + layout.size or header != layout.header(key):
            raise self._corrupt("table or file size")
        return header, layout

    def _corrupt(self, what: str) -> CacheMiss:
        return CacheMiss("corrupt", f"{self._path}: {what}")

    def _read(self, offset: int, *views: memoryview) -> None:
        """Fills the views with what follows each other from ``offset`` on."""
        assert self._fd >= 0, "closed"
        left = [view for view in views if len(view)]
        while left:
            try:
                got = os.preadv(self._fd, left[:_MAX_VIEWS], offset)
            except OSError as error:
                raise CacheMiss("io", f"{self._path}: {error}") from error
            if not got:
                raise self._corrupt("too short")
            self.bytes_read += got
            offset += got
            # All of it, but for more than 2 GiB, or more views than one read takes.
            while got and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def _check(self, data: bytes | memoryview, position: int, what: str) -> None:
        if crc32(data) != self._checksums[position]:
            raise self._corrupt(what)

    def _read_index(self, names: Sequence[str]) -> list[Tensor]:
        """Tensors that follow each other in the file, with one read, checked."""
        places = [self._layout.tensors[name] for name in names]
        tensors = [torch.empty(place.shape, dtype=place.dtype) for place in places]
        views = [byte_view(tensor) for tensor in tensors]
        self._read(self._data_start + places[0].start, *views)
        for name, view in zip(names, views, strict=True):
            self._check(view, 1 + INDEX.index(name), name)
        return tensors

    def _group(self, names: tuple[str, ...]) -> list[Tensor]:
        if names not in self._groups:
            self._groups[names] = self._read_index(names)
        return self._groups[names]

    def statistics(self) -> ChunkStatistics:
        block_max, block_min, stable, outliers = self._group(_STATISTICS)
        return ChunkStatistics(
            block_max=block_max,
            block_min=block_min,
            outliers=outliers.view(torch.bool),
            stable=stable.view(torch.bool),
        )

    def local_query(self) -> Tensor:
        return self._group(_LOCAL_QUERY)[0]

    def block_means(self) -> BlockMeans:
        codes, scale = self._group(_SUMMARIES)
        return BlockMeans(codes=codes, scale=scale)

    def key_range(self) -> Tensor:
        if _KEY_RANGE not in self._groups:
            self._keep_range(self._read_index(_KEY_RANGE)[0])
        return self._groups[_KEY_RANGE][0]

    def _keep_range(self, found: Tensor) -> None:
        if not is_sound(found):
            raise self._corrupt("key_range")
        self._groups[_KEY_RANGE] = [found]

    def read_all(self, out: Sequence[Tensor]) -> None:
        layout = self._layout
        n_layers, *shape = layout.tensors["entries"].shape
        assert len(out) == n_layers
        assert all((o.dtype, list(o.shape)) == (torch.uint8, shape) for o in out)
        assert all(o.is_contiguous() for o in out)
        layers = [byte_view(layer) for layer in out]
        if _KEY_RANGE in self._groups:
            self._read(self._entries_start, *layers)
        else:  # It lies right before the entries, so one read takes both.
            place = layout.tensors["key_range"]
            found = torch.empty(place.shape, dtype=place.dtype)
            view = byte_view(found)
            self._read(self._data_start + place.start, view, *layers)
            self._check(view, 1 + INDEX.index("key_range"), "key_range")
            self._keep_range(found)
        position = 1 + len(INDEX)
        for of_layer in layers:
            for start, n_bytes in layout.block_places:
                self._check(of_layer[start : start + n_bytes], position, "block")
                position += 1

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        # The hot path of a request: thousands of calls, so no tensor operation in any loop.
        layout = self._layout
        assert 0 <= layer < layout.fingerprint.n_layers and min(blocks, default=0) >= 0
        assert out.dtype == torch.uint8
        places, view = layout.block_places, byte_view(out)
        base = self._entries_start + layer * layout.layer_bytes
        runs: list[list[int]] = []  # adjacent in the file: its offset, and a range of `view`
        done = end = 0
        for block in blocks:
            start, n_bytes = places[block]
            if base + start != end:
                end = base + start
                runs.append([end, done, done])
            end += n_bytes
            done += n_bytes
            runs[-1][2] = done
        assert done == len(view), "the tensor must hold exactly the entries of the blocks"
        for offset, first, last in runs:
            self._read(offset, view[first:last])
        first_checksum = 1 + len(INDEX) + layer * len(places)
        done = 0
        for block in blocks:
            end = done + places[block][1]
            self._check(view[done:end], first_checksum + block, "block")
            done = end

    def verify(self) -> None:
        *_, key_range = self._read_index(INDEX)
        self._keep_range(key_range)
        n_layers, *shape = self._layout.tensors["entries"].shape
        entries = torch.empty(shape, dtype=torch.uint8)
        for layer in range(n_layers):
            self.read_blocks(layer, range(self.blocks.n_blocks), entries)

    def close(self) -> None:
        self._file.close()
        self._fd = -1

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

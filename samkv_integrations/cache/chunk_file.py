"""Reading the file of one chunk cache (`file_format` says what it holds)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from samkv_integrations.cache.checked_file import BAD_JSON, CheckedFile
from samkv_integrations.cache.chunk import BlockMeans, ChunkCache, ChunkStatistics, Fingerprint
from samkv_integrations.cache.file_format import INDEX, FileLayout, byte_view
from samkv_integrations.cache.quantise import is_sound
from samkv_integrations.errors import CacheMiss

# Tensors that are read together, in file order.
_STATISTICS = ("block_max", "block_min", "stable", "outliers")
_TEXT = ("text",)
_LOCAL_QUERY = ("local_query",)
_SUMMARIES = ("summary_codes", "summary_scale")
_KEY_RANGE = ("key_range",)


class ChunkFile:
    """An open chunk file, which reads and checks only what is asked for.

    Opening verifies identity: format version, fingerprint, key, namespace, table, file size, and
    the MACs of the header, the token ids and the statistics. The rest is checked when it is read.
    Whatever is wrong raises `CacheMiss`.
    """

    def __init__(
        self, path: Path, key: str, fingerprint: Fingerprint, *, namespace: str, secret: bytes
    ) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self._groups: dict[tuple[str, ...], list[Tensor]] = {}
        self._file = CheckedFile(path, secret)
        try:
            layout = self._layout = self._expected_layout(path, namespace)
            self.n_tokens, self.blocks = layout.n_tokens, layout.blocks
            self._file.read_macs(layout.tensors["macs"].shape[0])
            first = self._read_index(("token_ids", *_STATISTICS))
            self.token_ids, *self._groups[_STATISTICS] = first
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        return self._file.bytes_read

    def _expected_layout(self, path: Path, namespace: str) -> FileLayout:
        """Where everything must sit, and that the file says the same."""
        file = self._file
        try:
            digest, key = file.metadata["fingerprint"], file.metadata["key"]
            model = json.loads(file.metadata["fingerprint_fields"])["model"]
            n_tokens, n_text = (int(file.metadata[name]) for name in ("n_tokens", "n_text"))
        except BAD_JSON as error:
            raise file.corrupt("metadata") from error
        if digest != self.fingerprint.digest:
            raise CacheMiss("fingerprint", f"{path}: {digest}")
        if key != self.key:
            raise CacheMiss("tokens", f"{path}: holds chunk {key}")
        if not (1 <= n_tokens <= file.size and 0 <= n_text <= file.size):
            raise file.corrupt("sizes of token ids and text")
        # The label of the model is the one field that may differ between equal fingerprints.
        layout = FileLayout(
            fingerprint=replace(self.fingerprint, model=model), n_tokens=n_tokens,
            namespace=namespace, n_text=n_text,
        )  # fmt: skip
        header = layout.header(key)
        if file.size != len(header) + layout.size or file.header != header:
            raise file.corrupt("table or file size")
        return layout

    def _read_index(self, names: Sequence[str]) -> list[Tensor]:
        """Tensors that follow each other in the file, with one read, checked."""
        places = [self._layout.tensors[name] for name in names]
        tensors = [torch.empty(place.shape, dtype=place.dtype) for place in places]
        views = [byte_view(tensor) for tensor in tensors]
        self._file.read(places[0].start, *views)
        for name, view in zip(names, views, strict=True):
            self._file.check([view], [1 + INDEX.index(name)], name)
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

    def text(self) -> str:
        try:
            return bytes(byte_view(self._group(_TEXT)[0])).decode(errors="surrogatepass")
        except UnicodeDecodeError as error:
            raise self._file.corrupt("text") from error

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
            raise self._file.corrupt("key_range")
        self._groups[_KEY_RANGE] = [found]

    def read_all(self, out: Sequence[Tensor]) -> None:
        layout = self._layout
        n_layers, *shape = layout.tensors["entries"].shape
        assert len(out) == n_layers
        assert all((o.dtype, list(o.shape)) == (torch.uint8, shape) for o in out)
        assert all(o.is_contiguous() for o in out)
        layers = [byte_view(layer) for layer in out]
        tensors = layout.tensors
        if _KEY_RANGE in self._groups:
            self._file.read(tensors["entries"].start, *layers)
        else:  # It lies right before the entries, so one read takes both.
            place = tensors["key_range"]
            found = torch.empty(place.shape, dtype=place.dtype)
            view = byte_view(found)
            self._file.read(place.start, view, *layers)
            self._file.check([view], [1 + INDEX.index("key_range")], "key_range")
            self._keep_range(found)
        places = layout.block_places
        regions = [
            of_layer[start : start + n_bytes] for of_layer in layers for start, n_bytes in places
        ]
        first = 1 + len(INDEX)
        self._file.check(regions, range(first, first + len(regions)), "block")

    def read_blocks(self, layer: int, blocks: Sequence[int], out: Tensor) -> None:
        # The hot path of a request: thousands of calls, so no tensor operation in any loop.
        layout = self._layout
        assert 0 <= layer < layout.fingerprint.n_layers and min(blocks, default=0) >= 0
        assert out.dtype == torch.uint8
        places, view = layout.block_places, byte_view(out)
        base = layout.tensors["entries"].start + layer * layout.layer_bytes
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
            self._file.read(offset, view[first:last])
        of_layer = 1 + len(INDEX) + layer * len(places)
        regions, done = [], 0
        for block in blocks:
            end = done + places[block][1]
            regions.append(view[done:end])
            done = end
        self._file.check(regions, [of_layer + block for block in blocks], "block")

    def chunk(self) -> ChunkCache:
        place = self._layout.tensors["entries"]
        entries = torch.empty(place.shape, dtype=place.dtype)
        self.read_all(list(entries))
        return ChunkCache(
            key=self.key, fingerprint=self._layout.fingerprint, text=self.text(),
            token_ids=self.token_ids, entries=entries, key_range=self.key_range(),
            local_query=self.local_query(), statistics=self.statistics(),
            block_means=self.block_means(),
        )  # fmt: skip

    def verify(self) -> None:
        *_, key_range = self._read_index(INDEX)
        self._keep_range(key_range)
        n_layers, *shape = self._layout.tensors["entries"].shape
        entries = torch.empty(shape, dtype=torch.uint8)
        for layer in range(n_layers):
            self.read_blocks(layer, range(self.blocks.n_blocks), entries)

    def let_go(self) -> None:
        self._file.let_go()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

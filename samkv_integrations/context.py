"""What a request reads of its cached chunks: evidence for selection, and rows to reuse."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from samkv_integrations.analysis import block_means, dequantise_keys, mean_of_blocks
from samkv_integrations.chunk import Fingerprint
from samkv_integrations.errors import CacheMiss
from samkv_integrations.layout import Layout
from samkv_integrations.methods.parts import Evidence
from samkv_integrations.store import StoredChunk


class ChunkLost(Exception):
    """A chunk cache failed while it was read; ``index`` counts the request's cached chunks."""

    def __init__(self, index: int, miss: CacheMiss) -> None:
        super().__init__(str(miss))
        self.index = index
        self.reason = miss.reason


class Context:
    """The cached rows of one request. Every block is read from the store at most once.

    keys, values: (L, Tctx, G, D) on the CPU, keys un-rotated. They span the whole context, but the
        operating system commits only the pages of rows that were really read.
    load_s: seconds spent reading so far.
    """

    def __init__(
        self, layout: Layout, chunks: Sequence[StoredChunk], fingerprint: Fingerprint
    ) -> None:
        shape = (
            fingerprint.n_layers,
            layout.n_context,
            fingerprint.n_kv_heads,
            fingerprint.head_dim,
        )
        self.layout = layout
        self.chunks = chunks
        self.fingerprint = fingerprint
        self.keys = torch.empty(shape, dtype=fingerprint.torch_dtype)
        self.values = torch.empty(shape, dtype=fingerprint.torch_dtype)
        self.load_s = 0.0
        self._loaded = torch.zeros(fingerprint.n_layers, layout.n_blocks, dtype=torch.bool)
        self._token_start = (layout.block_lengths.cumsum(0) - layout.block_lengths).tolist()
        self._token_stop = layout.block_lengths.cumsum(0).tolist()
        self._chunk = layout.block_chunk.tolist()
        self._first_block = layout.first_block.tolist() if layout.n_chunks else []

    @property
    def bytes_read(self) -> int:
        return sum(chunk.bytes_read for chunk in self.chunks)

    def load(self, layer: int, blocks: Tensor) -> None:
        """Read ``blocks`` (Nb,) bool of ``layer``, those not read before. Raises ChunkLost."""
        missing = (blocks & ~self._loaded[layer]).nonzero()[:, 0].tolist()
        if not missing:
            return
        began = time.perf_counter()
        keys, values = self.keys[layer], self.values[layer]
        for run in _runs(missing, self._chunk):
            index = self._chunk[run[0]]
            start, stop = self._token_start[run[0]], self._token_stop[run[-1]]
            first = self._first_block[index]
            try:
                self.chunks[index].read_blocks(
                    layer, [b - first for b in run], keys[start:stop], values[start:stop]
                )
            except CacheMiss as miss:
                raise ChunkLost(index, miss) from miss
        self._loaded[layer] |= blocks
        self.load_s += time.perf_counter() - began

    def evidence(self, reads: frozenset[str], stable_layers: tuple[int, ...]) -> Evidence:
        """The evidence named in ``reads``, for all chunks of the request. Raises ChunkLost."""
        began = time.perf_counter()
        parts: dict[str, list[Tensor]] = {}
        for index, (chunk, first) in enumerate(zip(self.chunks, self._first_block, strict=True)):
            try:
                for name, tensor in self._of_chunk(chunk, first, reads).items():
                    parts.setdefault(name, []).append(tensor)
            except CacheMiss as miss:
                raise ChunkLost(index, miss) from miss
        per_chunk = {"local_query", "block_max", "block_min"}
        tensors = {
            name: torch.stack(values, dim=1) if name in per_chunk else torch.cat(values, dim=1)
            for name, values in parts.items()
        }
        self.load_s += time.perf_counter() - began
        if "anchor_mean" in reads:
            tensors["anchor_mean"] = self._anchor_mean()
        if "anchor_summaries" in reads:
            anchors = self._anchor_rows()
            lengths = self.layout.block_lengths[self.layout.is_anchor]
            tensors["summaries"][:, self.layout.is_anchor] = mean_of_blocks(anchors, lengths)
        return Evidence(n_layers=self.fingerprint.n_layers, stable_layers=stable_layers, **tensors)

    def _of_chunk(
        self, chunk: StoredChunk, first_block: int, reads: frozenset[str]
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if "summaries" in reads:
            of_middle, blocks = block_means(chunk.summaries()), chunk.blocks.middle_blocks
            around = (0, 0, 0, 0, blocks.start, chunk.blocks.n_blocks - blocks.stop)
            found["summaries"] = F.pad(of_middle, around)
        if "keys" in reads:
            found["keys"] = dequantise_keys(chunk.codes(), self.fingerprint.code_bits)
        if "local_query" in reads:
            found["local_query"] = chunk.local_query().float()
        if "statistics" in reads:
            statistics = chunk.statistics()
            for name in ("block_max", "block_min"):
                block = getattr(statistics, name).long()
                found[name] = torch.where(block < 0, block, block + first_block)
            found["outliers"] = statistics.outliers
        return found

    def _anchor_mean(self) -> Tensor:
        """(L, C, G, D) float32: mean un-rotated key of each chunk's anchor rows."""
        layout = self.layout
        anchor = layout.is_anchor[layout.block_of_token]
        counts = torch.bincount(layout.chunk_of_token[anchor], minlength=layout.n_chunks)
        return mean_of_blocks(self._anchor_rows(), counts)

    def _anchor_rows(self) -> Tensor:
        """(L, A, G, D) un-rotated keys of all anchor rows, in prompt order."""
        layout = self.layout
        for layer in range(self.fingerprint.n_layers):
            self.load(layer, layout.is_anchor)
        return self.keys[:, layout.is_anchor[layout.block_of_token]]


def _runs(blocks: list[int], chunk: list[int]) -> list[list[int]]:
    """Ascending block indices as runs of neighbours within one chunk."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][-1] == block - 1 and chunk[block] == chunk[block - 1]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs

"""Reads a request's chunk caches: KV entries, and the inputs of a selection."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.errors import CacheMiss
from samkv_integrations.runtimes.base import ChunkLost
from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    decode_means,
    mean_of_blocks,
)
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    block_means,
    entry_format_of,
    key_range,
    local_query,
    statistics,
)
from samkv_integrations.runtimes.transformers.entries.hot import HotChunk, HotChunks, readers
from samkv_integrations.runtimes.transformers.entries.quantise import (
    GROUP_TOKENS,
    Entries,
    EntryFormat,
)
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.papers.base import SelectionInputs
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import Fingerprint


@contextmanager
def _reading(chunk: StoredChunk) -> Iterator[None]:
    """Inside this block, a CacheMiss becomes ChunkLost of ``chunk``."""
    try:
        yield
    except CacheMiss as miss:
        raise ChunkLost(chunk, miss) from miss


LAYERS_TOGETHER = 4
"""Layers of a chunk in one read, if threads read while layers run."""


def _of_pairs(rotation: Rotation, form: EntryFormat) -> Rotation:
    """Cos and sin in the form of `Entries`: (R, 1, D / 2), on a CPU (R, G, D / 2)."""

    def of_pairs(side: Tensor) -> Tensor:
        heads = form.n_kv_heads if side.device.type == "cpu" else 1
        pairs = side[:, None, : form.head_dim // 2].float()
        return pairs.expand(-1, heads, -1).contiguous()

    turns = [(of_pairs(cos), of_pairs(sin)) for cos, sin in rotation.turns]
    return Rotation(turns=turns, kinds=rotation.kinds)


class CachedEntries:
    """The cached KV entries of one request, in their stored format, each layer's on its device.

    A context manager; at its exit all reading threads have ended. For a CPU, all reading ends
    before a pass runs. For other devices, threads read whole chunks, the lower layers first, and
    each layer of a pass waits for its own entries only. For CUDA, threads read into pinned memory,
    so that copies do not block. An entry is read twice only if few blocks of its chunk are loaded
    first, and most of the chunk later, in one read.

    rotation: that of the positions of the cached keys. hot: keeps the chunks that are read whole.
    """

    def __init__(
        self,
        layout: TensorLayout,
        chunks: Sequence[StoredChunk],
        fingerprint: Fingerprint,
        rotation: Rotation,
        hot: HotChunks,
    ) -> None:
        self.layout = layout
        self.chunks, self._hot = chunks, hot
        self.form = entry_format_of(fingerprint)
        self.n_layers = fingerprint.n_layers
        self._devices = [rotation.of(layer)[0].device for layer in range(self.n_layers)]
        self._is_pinned = any(device.type == "cuda" for device in self._devices)
        self._read: list[Tensor] = []  # (Tctx, E) uint8 of each layer; empty before the first read
        self._codes: list[Tensor | None] = [None] * self.n_layers  # the same, on its device
        n_groups = [self.form.range_shape(chunk.n_tokens)[0] for chunk in chunks]
        first_group = torch.tensor([0, *n_groups]).cumsum(0)
        self._groups = [range(*first_group[at : at + 2].tolist()) for at in range(len(chunks))]
        _, *of_group = self.form.range_shape(0)
        ranges = (self.n_layers, int(first_group[-1]), *of_group)  # (L, N, 2, G, D) of all groups
        self._read_range = torch.empty(ranges, dtype=torch.float16, pin_memory=self._is_pinned)
        self._key_range: dict[torch.device, Tensor] = {}  # the same, on each device
        group = first_group[:-1][layout.chunk_of_token] + layout.offset_in_chunk // GROUP_TOKENS
        self._group_of_token = {device: group.to(device) for device in set(self._devices)}
        self._turns = _of_pairs(rotation, self.form)
        # the tokens of the last `write`; group, cos and sin of each token, by rotation
        self._tokens: Tensor | None = None
        self._of_tokens: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._loaded = torch.zeros(self.n_layers, layout.n_blocks, dtype=torch.bool)
        self._in_memory: dict[int, Tensor] = {}  # (L, t, E) of the t tokens of each hot chunk
        hot_chunks = (chunk for chunk in chunks if isinstance(chunk, HotChunk))
        events = (chunk.hot.copied for chunk in hot_chunks)
        self._copied = {id(copied): copied for copied in events if copied}
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, HotChunk):
                blocks = layout.block_range[index]
                self._loaded[:, blocks.start : blocks.stop] = True
                self._in_memory[index] = self._hot_entries(index, chunk)
        # for each chunk that threads read, a future for each `LAYERS_TOGETHER` layers
        self._reads: list[list[Future[None]]] = []
        self._work: list[Future[None]] = []
        self._is_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        wait([each for each in self._work if not each.cancel()])

    def _hot_entries(self, index: int, chunk: HotChunk) -> Tensor:
        tokens, entries = self.layout.token_range[index], chunk.hot.entries
        offsets = self.layout.offset_in_chunk[tokens.start : tokens.stop]
        if bool((offsets.diff() == 1).all()):  # one run needs no copy
            return entries[:, int(offsets[0]) : int(offsets[-1]) + 1]
        self._wait_for_copies(-1)
        if self._is_pinned and entries.is_cpu:  # a copy to the host may still run
            torch.cuda.synchronize(self._devices[-1])
        return entries.index_select(1, offsets.to(entries.device))

    def load(self, blocks: Tensor) -> None:
        """Read the ``blocks`` (L, Nb) bool that were not read before. Raises ChunkLost.

        If more than half of a chunk is missing, one sequential read takes all of it. A chunk that
        can be hot is read as a whole, too, so that later questions need not read it.
        """
        layout, missing = self.layout, blocks & ~self._loaded
        if not bool(missing.any()):
            return
        for layer in range(self.n_layers):
            self._wait_for(layer)
        if not self._read:
            # for the whole context: the system commits unpinned pages only when they are written
            shape = (layout.n_context, self.form.n_bytes)
            self._read = [
                torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_pinned)
                for _ in range(self.n_layers)
            ]
        whole: dict[StoredChunk, list[int]] = {}
        for index, chunk in enumerate(self.chunks):
            if index in self._in_memory:
                continue
            of_chunk = layout.block_range[index]
            wanted = missing[:, of_chunk.start : of_chunk.stop]
            n_wanted = int(wanted.sum())  # one long read beats many short ones
            if n_wanted and (2 * n_wanted > wanted.numel() or self._hot.fits(chunk)):
                whole.setdefault(chunk, []).append(index)
                wanted |= True  # a view of `missing`: marks all blocks as loaded
                continue
            with _reading(chunk):
                self._keep_range(index)
                self._read_blocks(index, wanted)
        self._loaded |= missing
        self._codes, self._key_range = [None] * self.n_layers, {}
        for chunk, places in whole.items():
            if all(device.type == "cpu" for device in self._devices):
                kept = self._hot.room_for(chunk)
                self._read_whole(chunk, places, 0, self._read, kept)
                if kept is not None:
                    self._hot.keep(chunk, kept)
                continue
            parts: list[Future[None]] = [Future() for _ in range(0, self.n_layers, LAYERS_TOGETHER)]
            self._reads.append(parts)
            read = list(self._read)  # a copy, as `release` may drop layers
            work = readers(os.getpid(), "read").submit(self._read_parts, chunk, places, read, parts)
            self._work.append(work)

    def _read_blocks(self, index: int, wanted: Tensor) -> None:
        """Read blocks of a chunk, neighbours in one read. wanted: (L, blocks of it) bool."""
        chunk, layout = self.chunks[index], self.layout
        tokens, blocks = layout.token_range[index], layout.block_range[index]
        offsets = layout.offset_in_chunk[tokens.start : tokens.stop]
        in_chunk = layout.block_in_chunk[blocks.start : blocks.stop]
        for layer, of_layer in enumerate(wanted):
            out = self._read[layer][tokens.start : tokens.stop]
            needed = in_chunk[of_layer]
            gaps = (needed.diff() != 1).nonzero()[:, 0] + 1
            for neighbours in needed.tensor_split(gaps.tolist()):
                if not len(neighbours):
                    continue  # this layer needs no block
                first, last = int(neighbours[0]), int(neighbours[-1])
                begin, end = chunk.blocks.span(first)[0], chunk.blocks.span(last)[1]
                entries = torch.empty(end - begin, self.form.n_bytes, dtype=torch.uint8)
                chunk.read_blocks(layer, range(first, last + 1), entries.numpy())
                at = ((offsets >= begin) & (offsets < end)).nonzero()[:, 0]
                out[at] = entries[offsets[at] - begin]

    def _read_parts(
        self, chunk: StoredChunk, places: Sequence[int], read: Sequence[Tensor],
        parts: Sequence[Future[None]],
    ) -> None:  # fmt: skip
        """Read layers part after part; the future of each part is set once the part is read."""
        try:
            kept = self._hot.room_for(chunk)
            for at, part in enumerate(parts):
                if self._is_left:
                    return
                first = at * LAYERS_TOGETHER
                some = read[first : first + LAYERS_TOGETHER]
                self._read_whole(chunk, places, first, some, kept)
                part.set_result(None)
            if kept is not None:
                self._hot.keep(chunk, kept)
        except BaseException as error:
            for part in parts:
                if not part.done():
                    part.set_exception(error)

    @torch.inference_mode()
    def _read_whole(
        self, chunk: StoredChunk, places: Sequence[int], first: int, sides: Sequence[Tensor],
        kept: Tensor | None,
    ) -> None:  # fmt: skip
        """Read layers of a chunk into each of its places in the prompt.

        sides: (Tctx, E) of each layer from ``first`` on. kept: see `HotChunks.room_for`.
        """
        layout = self.layout
        into = None if kept is None else [*kept[first : first + len(sides)]]
        for index in places if into is None else ():
            tokens = layout.token_range[index]
            if len(tokens) == chunk.n_tokens:
                into = [side[tokens.start : tokens.stop] for side in sides]
        if into is None:
            shape = (len(sides), chunk.n_tokens, self.form.n_bytes)
            into = [*torch.empty(shape, dtype=torch.uint8)]
        with _reading(chunk):
            chunk.read_layers(first, [side.numpy() for side in into])
            if first == 0:
                for index in places:
                    self._keep_range(index)
        for index in places:
            tokens = layout.token_range[index]
            offsets = layout.offset_in_chunk[tokens.start : tokens.stop]
            for side, entries in zip(sides, into, strict=True):
                out = side[tokens.start : tokens.stop]
                if out.data_ptr() != entries.data_ptr():
                    torch.index_select(entries, 0, offsets, out=out)

    def _keep_range(self, index: int) -> None:
        groups, found = self._groups[index], key_range(self.chunks[index])
        # NumPy, because torch would start its own threads for the copy
        self._read_range.numpy()[:, groups.start : groups.stop] = found.numpy()

    def _wait_for(self, layer: int) -> None:
        """Wait until a layer has been read. Raises ChunkLost."""
        for parts in self._reads:
            parts[layer // LAYERS_TOGETHER].result()

    def _wait_for_copies(self, layer: int) -> None:
        """Let the GPU wait until a layer of the hot chunks is copied to it."""
        for copied in self._copied.values():
            torch.cuda.current_stream(self._devices[layer]).wait_event(copied[layer])

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Wait for a layer; returns its entries (Tctx, E) and key ranges (N, 2, G, D)."""
        self._wait_for(layer)
        codes, device = self._codes[layer], self._devices[layer]
        if codes is None:
            self._wait_for_copies(layer)
            if self._read:
                codes = self._read[layer]
            else:  # no block was read: all tokens are hot or computed
                shape = (self.layout.n_context, self.form.n_bytes)
                codes = torch.empty(shape, dtype=torch.uint8, device=device)
            in_memory = {index: entries[layer] for index, entries in self._in_memory.items()}
            codes = self._moved(codes, in_memory, self.layout.token_range, 0, device)
            self._codes[layer] = codes
        if device not in self._key_range:
            self._wait_for(0)
            hot = {
                index: chunk.hot.key_range
                for index, chunk in enumerate(self.chunks)
                if isinstance(chunk, HotChunk)
            }
            self._key_range[device] = self._moved(self._read_range, hot, self._groups, 1, device)
        return codes, self._key_range[device][layer]

    def _moved(
        self, read: Tensor, in_memory: Mapping[int, Tensor], places: Sequence[range], dim: int,
        device: torch.device,
    ) -> Tensor:  # fmt: skip
        """``read`` on a device, with the tensors of hot chunks at their indices of ``dim``."""
        if not in_memory:
            is_here = read.device == device
            return read if is_here else read.to(device, non_blocking=self._is_pinned)
        parts = [
            in_memory[index] if index in in_memory else read.narrow(dim, place.start, len(place))
            for index, place in enumerate(places)
        ]
        return torch.cat([part.to(device, non_blocking=self._is_pinned) for part in parts], dim)

    def entries(self, layer: int, tokens: Tensor) -> Entries:
        """The entries of context tokens (n,), in order and on the layer's device.

        Entries that were not loaded are undefined.
        """
        (codes, key_range), (cos, sin) = self.stored(layer), self._turns.of(layer)
        entries = Entries(
            form=self.form, codes=codes, key_range=key_range,
            group=self._group_of_token[self._devices[layer]], cos=cos, sin=sin,
        )  # fmt: skip
        return entries if len(tokens) == len(entries) else entries.select(tokens)

    def write(self, layer: int, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rotated keys, and values, of context tokens (n,), into (n, G, D) each.

        The numbers of tokens that were not loaded are undefined.

        tokens: on the layer's device, in any order. Layers with the same tokens share the tensor.
        """
        if not len(tokens):
            return
        codes, key_range = self.stored(layer)
        if tokens is not self._tokens:
            self._tokens, self._of_tokens = tokens, {}
        kind = self._turns.kinds[layer]
        if kind not in self._of_tokens:
            group = self._group_of_token[tokens.device].index_select(0, tokens)
            cos, sin = (side.index_select(0, tokens) for side in self._turns.of(layer))
            self._of_tokens[kind] = group, cos, sin
        group, cos, sin = self._of_tokens[kind]
        Entries(
            form=self.form, codes=codes, rows=tokens, key_range=key_range, group=group, cos=cos,
            sin=sin,
        ).write(keys, values)  # fmt: skip

    def keys_and_values(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, (n, G, D) each, of context tokens (n,), see `write`."""
        shape = (2, len(tokens), self.form.n_kv_heads, self.form.head_dim)
        keys, values = torch.empty(shape, dtype=self.form.dtype, device=tokens.device)
        self.write(layer, tokens, keys, values)
        return keys, values

    def release(self, layer: int) -> None:
        """Free the entries of a layer."""
        self._codes[layer] = torch.empty(0, dtype=torch.uint8)
        if self._read:
            self._read[layer] = torch.empty(0, dtype=torch.uint8)

    def inputs(self, needs: frozenset[str], stable_layers: tuple[int, ...]) -> SelectionInputs:
        """The inputs named in ``needs``, for all chunks of the request. Raises ChunkLost."""
        tensors: dict[str, Tensor] = {}
        parts: dict[str, list[Tensor]] = {}
        for index in range(len(self.chunks)) if needs else ():
            for name, tensor in self._inputs_of_chunk(index, needs).items():
                parts.setdefault(name, []).append(tensor)
        for name, values in parts.items():
            is_per_chunk = name in ("local_query", "block_max", "block_min")
            joined = torch.stack(values, dim=1) if is_per_chunk else torch.cat(values, dim=1)
            tensors[name] = joined.to(self._devices[0])
        if "anchor_mean" in needs:
            tensors["anchor_mean"] = self._anchor_mean()
        return SelectionInputs(n_layers=self.n_layers, stable_layers=stable_layers, **tensors)

    def _inputs_of_chunk(self, index: int, needs: frozenset[str]) -> dict[str, Tensor]:
        """The stored data of a chunk, for its blocks and tokens in the prompt; layers first."""
        chunk, layout, found = self.chunks[index], self.layout, dict[str, Tensor]()
        tokens, blocks = layout.token_range[index], layout.block_range[index]
        in_prompt = layout.block_in_chunk[blocks.start : blocks.stop]
        with _reading(chunk):
            if "block_means" in needs:
                middle, n_blocks = chunk.blocks.middle_blocks, chunk.blocks.n_blocks
                around = (0, 0, 0, 0, middle.start, n_blocks - middle.stop)
                means = F.pad(decode_means(block_means(chunk)), around)
                found["block_means"] = means[:, in_prompt]
            if "local_query" in needs:
                found["local_query"] = local_query(chunk).float()
            if "statistics" in needs:
                of_chunk = statistics(chunk)
                # one more element for the index -1, which means no middle block
                place = torch.full((chunk.blocks.n_blocks + 1,), -1)
                place[in_prompt] = torch.arange(blocks.start, blocks.stop)
                found["block_max"] = place[of_chunk.block_max.long()]
                found["block_min"] = place[of_chunk.block_min.long()]
                offsets = layout.offset_in_chunk[tokens.start : tokens.stop]
                found["outliers"] = of_chunk.outliers[:, offsets]
        return found

    def _anchor_mean(self) -> Tensor:
        """(L, C, G, D) float32, see `SelectionInputs`. Loads the anchor tokens."""
        layout = self.layout
        self.load(layout.is_anchor.expand(self.n_layers, -1))
        anchor = layout.is_anchor[layout.block_of_token]
        counts = torch.bincount(layout.chunk_of_token[anchor], minlength=layout.n_chunks)
        at, keys = anchor.nonzero()[:, 0], []
        for layer in range(self.n_layers):
            codes, key_range = self.stored(layer)
            at = at.to(codes.device)
            group = self._group_of_token[codes.device][at]
            of_layer = self.form.keys(codes.index_select(0, at), key_range, group)
            keys.append(of_layer.to(self._devices[0]))
        return mean_of_blocks(torch.stack(keys), counts)

"""What a request reads of its cached chunks: KV entries, and what a selection looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.cache.attention_stats import decode_means, mean_of_blocks
from samkv_integrations.cache.base import StoredChunk
from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.cache.quantise import GROUP_TOKENS, Entries
from samkv_integrations.errors import CacheMiss
from samkv_integrations.methods.base import SelectionInputs
from samkv_integrations.model.families import Rotation
from samkv_integrations.prompt.layout import Layout


class ChunkLost(Exception):
    """A chunk cache failed while it was read; ``index`` counts the request's cached chunks."""

    def __init__(self, index: int, miss: CacheMiss) -> None:
        super().__init__(str(miss))
        self.index = index
        self.miss = miss


@contextmanager
def _reading(index: int) -> Iterator[None]:
    """A miss in the block is the loss of cached chunk ``index``."""
    try:
        yield
    except CacheMiss as miss:
        raise ChunkLost(index, miss) from miss


class Context:
    """The cached KV entries of one request, as they are stored, on the model's device.

    No entry is read while a pass runs. One is read twice only where few blocks of its chunk were
    loaded first and most of the chunk after that, as one read.

    codes: (Tctx, E) uint8 of each layer. They span the whole context, but the operating system
        commits only the pages of what was really read.
    key_range: (L, N, 2, G, D) float16 of all groups of the context, see `EntryFormat`; N is 0
        until something is loaded.
    rotation: of the positions where cached keys sit.
    """

    def __init__(
        self,
        layout: Layout,
        chunks: Sequence[StoredChunk],
        fingerprint: Fingerprint,
        rotation: Rotation,
    ) -> None:
        self.layout = layout
        self.chunks = chunks
        self.device = rotation.turns[0][0].device
        self.form = fingerprint.entry_format
        self.n_layers = fingerprint.n_layers
        shape = (layout.n_context, self.form.n_bytes)
        self._read = [torch.empty(shape, dtype=torch.uint8) for _ in range(self.n_layers)]
        self.codes = self._read
        no_range = (self.n_layers, *self.form.range_shape(0))
        self.key_range = torch.empty(no_range, dtype=torch.float16, device=self.device)
        n_groups = [self.form.range_shape(chunk.n_tokens)[0] for chunk in chunks]
        first_group = torch.tensor([0, *n_groups]).cumsum(0)[:-1]
        group = first_group[layout.chunk_of_token] + layout.offset_in_chunk // GROUP_TOKENS
        self.group_of_token = group.to(self.device)
        heads, half = self.form.n_kv_heads, self.form.head_dim // 2
        # of each channel pair and head, see `rotated_keys`
        self._turns = Rotation(
            turns=[
                (cos[:, None, :half].float().expand(-1, heads, -1).contiguous(),
                 sin[:, None, :half].float().expand(-1, heads, -1).contiguous())
                for cos, sin in rotation.turns
            ],
            kinds=rotation.kinds,
        )  # fmt: skip
        self._loaded = torch.zeros(self.n_layers, layout.n_blocks, dtype=torch.bool)

    def load(self, blocks: Tensor) -> None:
        """Read ``blocks`` (L, Nb) bool, those not read before. Raises ChunkLost.

        A chunk of which most is missing is read at once, from its first byte to its last.
        """
        layout, missing = self.layout, blocks & ~self._loaded
        whole: dict[StoredChunk, list[Tensor]] = {}  # all entries of chunks that were read, (T, E)
        for index, chunk in enumerate(self.chunks):
            tokens, of_chunk = layout.token_range[index], layout.block_range[index]
            wanted = missing[:, of_chunk.start : of_chunk.stop]
            out = [of_layer[tokens.start : tokens.stop] for of_layer in self._read]
            offsets = layout.offset_in_chunk[tokens.start : tokens.stop]
            with _reading(index):
                if 2 * int(wanted.sum()) > wanted.numel():  # one read of all beats many of most
                    if chunk not in whole:
                        shape = (self.n_layers, chunk.n_tokens, self.form.n_bytes)
                        is_whole = len(tokens) == chunk.n_tokens
                        whole[chunk] = out if is_whole else [*torch.empty(shape, dtype=torch.uint8)]
                        chunk.read_all(whole[chunk])
                    if whole[chunk] is not out:
                        for to, entries in zip(out, whole[chunk], strict=True):
                            torch.index_select(entries, 0, offsets, out=to)
                    wanted |= True
                    continue
                in_chunk = layout.block_in_chunk[of_chunk.start : of_chunk.stop]
                for layer, of_layer in enumerate(wanted):
                    needed = in_chunk[of_layer]
                    gaps = (needed.diff() != 1).nonzero()[:, 0] + 1
                    for neighbours in needed.tensor_split(gaps.tolist()):
                        if not len(neighbours):
                            continue  # nothing of this layer
                        first, last = int(neighbours[0]), int(neighbours[-1])
                        begin, end = chunk.blocks.span(first)[0], chunk.blocks.span(last)[1]
                        entries = torch.empty(end - begin, self.form.n_bytes, dtype=torch.uint8)
                        chunk.read_blocks(layer, range(first, last + 1), entries)
                        at = ((offsets >= begin) & (offsets < end)).nonzero()[:, 0]
                        out[layer][at] = entries[offsets[at] - begin]
        if bool(missing.any()):
            self._loaded |= missing
            self.codes = [of_layer.to(self.device) for of_layer in self._read]
            ranges = []
            for index, chunk in enumerate(self.chunks):
                with _reading(index):
                    ranges.append(chunk.key_range())
            self.key_range = torch.cat(ranges, dim=1).to(self.device)

    def entries(self, layer: int, tokens: Tensor) -> Entries:
        """Those of context tokens (n,), which are in order and on the model's device.

        Where nothing was loaded, they hold nothing yet.
        """
        codes, (cos, sin) = self.codes[layer], self._turns.of(layer)
        if not self._loaded.any():
            codes = torch.empty_like(codes, device=self.device)
        entries = Entries(
            form=self.form, codes=codes, key_range=self.key_range[layer],
            group=self.group_of_token, cos=cos, sin=sin,
        )  # fmt: skip
        return entries if len(tokens) == len(entries) else entries.select(tokens)

    def keys_and_values(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys at their positions, and values, (n, G, D) each, of context tokens (n,).

        tokens: loaded before, in order, on the model's device.
        """
        if not len(tokens):
            shape = (0, self.form.n_kv_heads, self.form.head_dim)
            empty = torch.empty(shape, dtype=self.form.dtype, device=self.device)
            return empty, empty
        entries = self.entries(layer, tokens)
        return entries.keys(), entries.values()

    def release(self, layer: int) -> None:
        """Free the entries of a layer: the request is done with it."""
        self.codes[layer] = self._read[layer] = torch.empty(0, dtype=torch.uint8)

    def inputs(self, needs: frozenset[str], stable_layers: tuple[int, ...]) -> SelectionInputs:
        """The inputs named in ``needs``, for all chunks of the request. Raises ChunkLost."""
        tensors: dict[str, Tensor] = {}
        parts: dict[str, list[Tensor]] = {}
        for index, chunk in enumerate(self.chunks if needs else ()):
            tokens, blocks = self.layout.token_range[index], self.layout.block_range[index]
            held = self.layout.block_in_chunk[blocks.start : blocks.stop]
            found: dict[str, Tensor] = {}
            with _reading(index):
                if "block_means" in needs:
                    middle, n_blocks = chunk.blocks.middle_blocks, chunk.blocks.n_blocks
                    around = (0, 0, 0, 0, middle.start, n_blocks - middle.stop)
                    means = F.pad(decode_means(chunk.block_means()), around)
                    found["block_means"] = means[:, held]
                if "local_query" in needs:
                    found["local_query"] = chunk.local_query().float()
                if "statistics" in needs:
                    statistics = chunk.statistics()
                    # the last is for "no middle", -1
                    place = torch.full((chunk.blocks.n_blocks + 1,), -1)
                    place[held] = torch.arange(blocks.start, blocks.stop)
                    found["block_max"] = place[statistics.block_max.long()]
                    found["block_min"] = place[statistics.block_min.long()]
                    offsets = self.layout.offset_in_chunk[tokens.start : tokens.stop]
                    found["outliers"] = statistics.outliers[:, offsets]
            for name, tensor in found.items():
                parts.setdefault(name, []).append(tensor)
        for name, values in parts.items():
            is_per_chunk = name in ("local_query", "block_max", "block_min")
            joined = torch.stack(values, dim=1) if is_per_chunk else torch.cat(values, dim=1)
            tensors[name] = joined.to(self.device)
        if "anchor_mean" in needs:
            tensors["anchor_mean"] = self._anchor_mean()
        return SelectionInputs(n_layers=self.n_layers, stable_layers=stable_layers, **tensors)

    def _anchor_mean(self) -> Tensor:
        """(L, C, G, D) float32: mean un-rotated key of each chunk's anchor tokens."""
        layout = self.layout
        self.load(layout.is_anchor.expand(self.n_layers, -1))
        anchor = layout.is_anchor[layout.block_of_token]
        counts = torch.bincount(layout.chunk_of_token[anchor], minlength=layout.n_chunks)
        tokens = anchor.nonzero()[:, 0].to(self.device)
        group = self.group_of_token[tokens]
        keys = [
            self.form.keys(codes.index_select(0, tokens), of_layer, group)
            for codes, of_layer in zip(self.codes, self.key_range, strict=True)
        ]
        return mean_of_blocks(torch.stack(keys), counts)

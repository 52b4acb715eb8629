"""Prefill of chunks: the keys and values of one pass become chunk caches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    chunk_statistics,
    layer_statistics,
    quantise_means,
)
from samkv_integrations.runtimes.transformers.entries.cache_arrays import cache_of, entry_format_of
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat, unrotate
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.passes.pause import Pause, no_pause
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint

# Limits of a batch: while chunks are cached, an answer waits for one batch at most.
BATCH_TOKENS = 1024  # on a CPU
DEVICE_BATCH_TOKENS = 2048  # on a device, whose host launches operations meanwhile
BATCH_CHUNKS = 32

Before = Sequence[tuple[Tensor, Tensor]]
"""For each layer, keys and values (1, G, P, D) of the prefix."""


def batches(chunks: Sequence[ChunkRef], device: torch.device) -> list[list[ChunkRef]]:
    """Group chunks for one pass each; a longer chunk has a pass of its own.

    A group has at most `BATCH_CHUNKS`, because each chunk takes time besides that of its tokens. On
    a device, which pads chunks, those of a group have similar lengths. On a CPU chunks are chosen
    to fill a group, because `Model.n_more_rows` pads groups.
    """

    def n_fitting(n_tokens: int) -> int:
        """How many of the ``rest`` have at most ``n_tokens``."""
        return bisect_right(rest, n_tokens, key=lambda chunk: len(chunk.token_ids))

    is_on_cpu = device.type == "cpu"
    rest = sorted(chunks, key=lambda chunk: len(chunk.token_ids))
    grouped: list[list[ChunkRef]] = []
    while rest:
        group, room = list[ChunkRef](), BATCH_TOKENS if is_on_cpu else DEVICE_BATCH_TOKENS
        while rest and len(group) < BATCH_CHUNKS:
            n_found = n_fitting(room)
            if not is_on_cpu and n_found < len(rest):
                n_found = 0  # the next chunk is too long
            elif is_on_cpu:  # the longest chunk that leaves room for another one
                n_found = n_fitting(room - len(rest[0].token_ids)) or n_found
            if not n_found and group:
                break
            group.append(rest.pop(n_found - 1))
            room -= len(group[-1].token_ids)
        grouped.append(group)
    return grouped


def entries_before(model: LayeredModel, prefix: Sequence[int], pause: Pause = no_pause) -> Before:
    """The entries of a prefix, by its token ids, computed once for all chunks."""
    shape = (1, model.n_kv_heads, 0, model.head_dim)
    empty = [torch.empty(shape, dtype=model.dtype, device=where) for where in model.layer_devices]
    before = list(zip(empty, empty, strict=True))

    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        before[layer] = key[:, :, :n_prefix], value[:, :, :n_prefix]
        if model.ends_at(layer):
            return None
        mask = model.window_mask(layer, len(ids))
        return model.attention(layer, query, key, value, scaling, mask, mask is None)

    if n_prefix := len(prefix):
        ids = [*prefix, *([0] * model.n_more_rows(n_prefix))]
        rotation = model.rotation(torch.arange(len(ids)))
        hidden = model.embed(torch.tensor([ids]))
        for layer in range(model.n_layers):
            pause()
            hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
    return before


class PrefilledChunks:
    """The caches of one pass, in host memory. A cache is put together when it is taken.

    So the threads that write files do that work while the next batch is computed.

    computed: on the CPU, for all chunks, R tokens in all: entries (L, R, E), key ranges (L, N, 2,
    G, D), local queries (L, C, H, D), alpha and sustained attention (L, R), and means of middle
    blocks (L, Nm, G, D) float32.
    """

    def __init__(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, computed: Sequence[Tensor]
    ) -> None:
        self._chunks, self._fingerprint, self._computed = chunks, fingerprint, computed
        blocks = [fingerprint.scheme.of(len(chunk.token_ids)) for chunk in chunks]
        form = entry_format_of(fingerprint)
        self._blocks = blocks
        self._tokens = _slices(of.n_tokens for of in blocks)
        self._groups = _slices(form.range_shape(of.n_tokens)[0] for of in blocks)
        self._means = _slices(len(of.middle_blocks) for of in blocks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[ChunkCache]:
        return map(self.__getitem__, range(len(self)))

    @torch.inference_mode()
    def __getitem__(self, at: int) -> ChunkCache:
        chunk, tokens = self._chunks[at], self._tokens[at]
        entries, key_range, local_query, alpha, sustained, means = self._computed
        return cache_of(
            chunk, self._fingerprint,
            # copies, so that a cache does not keep the memory of the whole batch
            entries=entries[:, tokens].clone(), key_range=key_range[:, self._groups[at]].clone(),
            local_query=local_query[:, at].clone(),
            statistics=chunk_statistics(alpha[:, tokens], sustained[:, tokens], self._blocks[at]),
            block_means=quantise_means(means[:, self._means[at]]),
        )  # fmt: skip


def _slices(lengths: Iterable[int]) -> list[slice]:
    """The slices of parts of these lengths that follow one another."""
    stops = list(accumulate(lengths, initial=0))
    return [slice(*each) for each in pairwise(stops)]


class _Means:
    """Means over N runs of tokens, without an operation for each run.

    runs: the tokens of each run. rows: (N * width,) these tokens, padded to the longest run's
    width: a shorter run repeats a token, with weight 0 in ``_weights`` (N, 1, width).
    """

    def __init__(self, runs: Sequence[range], device: torch.device) -> None:
        lengths = torch.tensor([len(run) for run in runs], dtype=torch.long)[:, None]
        first = torch.tensor([run.start for run in runs], dtype=torch.long)[:, None]
        offset = torch.arange(max(map(len, runs), default=0))
        self.rows = (first + torch.minimum(offset, lengths - 1)).flatten().to(device)
        self._weights = ((offset < lengths).float() / lengths)[:, None].to(device)

    def __call__(self, numbers: Tensor) -> Tensor:
        """(..., N, heads, D) float32 means. numbers: (..., N * width, heads, D) for ``rows``."""
        *before, _, n_heads, dim = numbers.shape
        n_runs, _, width = self._weights.shape
        numbers = numbers.float().reshape(*before, n_runs, width, n_heads * dim)
        return (self._weights @ numbers).view(*before, n_runs, n_heads, dim)


class _SideBySide:
    """Chunks of a pass as a batch (C, T) of rows; shorter chunks are padded to T tokens.

    of_pass: the rows of these chunks in the pass. n_later: see `layer_statistics`.
    """

    def __init__(self, first: int, lengths: Sequence[int], device: torch.device) -> None:
        self.of_pass = slice(first, first + sum(lengths))
        self._shape = len(lengths), max(lengths)
        each = torch.tensor(lengths)[:, None]
        start, at = each.cumsum(0) - each + first, torch.arange(self._shape[1])
        self.n_later = (each - 1 - at).to(device)
        self._rows = (start + torch.minimum(at, each - 1)).flatten().to(device)
        self._is_token = (at < each).flatten().nonzero()[:, 0].to(device)

    def stack(self, side: Tensor) -> Tensor:
        """(heads, R, D) of a pass as (C, heads, T, D); without a copy for a single chunk."""
        if self._shape[0] == 1:
            return side[None, :, self.of_pass]
        n_heads, _, dim = side.shape
        rows = side.index_select(1, self._rows)
        return rows.view(n_heads, *self._shape, dim).transpose(0, 1)

    def flatten(self, side: Tensor) -> Tensor:
        """(C, T, ...) without padding, one chunk behind the other."""
        if self._shape[0] == 1:
            return side[0]
        return side.flatten(0, 1).index_select(0, self._is_token)


class _LocalQueries:
    """The mean un-rotated query of each chunk's local tokens, of each layer.

    runs: the local tokens of each of the C chunks. means: (L, C, H, D) in the model's dtype.
    """

    def __init__(self, model: LayeredModel, rotation: Rotation, runs: Sequence[range]) -> None:
        shape = model.n_layers, len(runs), model.n_heads, model.head_dim
        self.means = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._of_runs = {device: _Means(runs, device) for device in {*model.layer_devices}}
        turns = []
        for cos, sin in rotation.turns:
            at = self._of_runs[cos.device].rows
            turns.append((cos.index_select(0, at), sin.index_select(0, at)))
        self._rotation = replace(rotation, turns=turns)

    def take(self, layer: int, query: Tensor) -> None:
        """query: (H, R, D) of a layer, rotated."""
        of_runs = self._of_runs[query.device]
        queries = query.transpose(0, 1).index_select(0, of_runs.rows).float()
        self.means[layer] = of_runs(unrotate(queries, *self._rotation.of(layer)))


_ENCODED = 2**24
"""Numbers of keys that a device quantises at a time. A CPU quantises layer by layer, because a
layer fits its cache."""


class _Encoder:
    """Quantises keys and values of a pass; on a device, several layers at a time.

    lengths: tokens of each chunk, R in all. middle_runs: the tokens of each of the Nm middle
    blocks. largest: the argument of `EntryFormat.check`, over the layers so far.
    """

    def __init__(
        self, model: LayeredModel, form: EntryFormat, lengths: Sequence[int],
        middle_runs: Sequence[range],
    ) -> None:  # fmt: skip
        self.largest: list[Tensor] = []
        self._n_layers, self._device = model.n_layers, model.device
        self._form, self._lengths = form, lengths
        self._middle = _Means(middle_runs, model.device)
        n_numbers = sum(lengths) * model.n_kv_heads * model.head_dim
        self._together = 1 if model.device.type == "cpu" else max(1, _ENCODED // n_numbers)
        self._waiting: list[tuple[Tensor, Tensor]] = []  # keys and values (R, G, D) of layers
        self._encoded: list[tuple[Tensor, Tensor, Tensor]] = []  # entries, key ranges, means

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """keys, values: (R, G, D) each, of the next layer; keys un-rotated."""
        self._waiting.append((keys.to(self._device), values.to(self._device)))
        if len(self._waiting) == self._together or layer == self._n_layers - 1:
            self._encode()

    def _encode(self) -> None:
        keys, values = (torch.stack(side) for side in zip(*self._waiting, strict=True))
        rows = keys.flatten(0, 1), values.flatten(0, 1)
        of_layers = [*self._lengths] * len(keys)
        entries, key_range, largest = self._form.encode_chunks(*rows, of_layers)
        means = self._middle(keys.index_select(1, self._middle.rows))
        self._encoded.append((entries, key_range, means))
        self.largest.append(largest)
        self._waiting.clear()

    def encoded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entries (L, R, E), key ranges (L, N, 2, G, D), and means (L, Nm, G, D) of all layers."""
        entries, key_range, means = (torch.cat(each) for each in zip(*self._encoded, strict=True))
        n_groups = sum(self._form.range_shape(length)[0] for length in self._lengths)
        return (
            entries.view(self._n_layers, sum(self._lengths), -1),
            key_range.view(self._n_layers, n_groups, *self._form.range_shape(0)[1:]),
            means,
        )


class _ChunkAttention:
    """The attention of chunks, each to the prefix and to itself, with its statistics.

    lengths: tokens of each chunk, R in all. before: the result of `entries_before`.
    alpha, sustained: (L, R) float32, see `layer_statistics`.
    """

    def __init__(self, model: LayeredModel, lengths: Sequence[int], before: Before) -> None:
        self._model, self._before, self._n_tokens = model, before, sum(lengths)
        self._n_prefix = before[0][0].shape[2]
        self._is_on_cpu = model.device.type == "cpu"
        shape = model.n_layers, self._n_tokens
        self.alpha, self.sustained = (
            torch.empty(shape, dtype=torch.float32, device=model.device) for _ in range(2)
        )
        # A device pads, because launches take longer than padding. A CPU computes chunk by chunk.
        parts = [[length] for length in lengths] if self._is_on_cpu else [lengths]
        firsts = [span.start for span in _slices(map(sum, parts))]
        self._groups = {
            device: [
                _SideBySide(first, part, device) for first, part in zip(firsts, parts, strict=True)
            ]
            for device in {*model.layer_devices}
        }

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        """(1, H, R', D), zeros behind the R tokens; None at the layer where the pass ends."""
        ends = self._model.ends_at(layer)
        output = torch.empty_like(query)
        output[:, self._n_tokens :] = 0
        for group in self._groups[query.device]:
            own, *rest = map(group.stack, (query, key, value))
            keys, values = (
                torch.cat((first.expand(len(side), -1, -1, -1), side), dim=2)
                for first, side in zip(self._before[layer], rest, strict=True)
            )
            attended = None if ends else group.stack(output)  # a view for a single chunk
            self._attend(layer, group, own, keys, values, scaling, attended)
            if attended is not None and len(own) > 1:
                flat = group.flatten(attended.transpose(1, 2))
                output[:, group.of_pass] = flat.transpose(0, 1)
        return None if ends else output[None]

    def _attend(
        self, layer: int, group: _SideBySide, query: Tensor, keys: Tensor, values: Tensor,
        scaling: float, out: Tensor | None,
    ) -> None:  # fmt: skip
        """Note the statistics of a group; if ``out`` is not None, write the attention into it.

        query, out: (C, H, T, D). keys, values: (C, G, P + T, D), the prefix first.
        """
        mask = self._model.window_mask(layer, keys.shape[2])
        is_plain = mask is None and self._model.scores_plainly
        found = layer_statistics(
            query, keys, scaling, n_later=group.n_later, n_prefix=self._n_prefix,
            tile=64 if self._is_on_cpu else 256,  # a CPU's cache holds the smaller tile
            value=values if is_plain and out is not None else None, out=out,
        )  # fmt: skip
        if not is_plain and out is not None:
            # as many queries as keys, so that causal attention needs no mask
            padded = pad(query, (0, 0, self._n_prefix, 0))
            whole = self._model.attention(layer, padded, keys, values, scaling, mask, mask is None)
            out[:] = whole[:, :, self._n_prefix :]
        self.alpha[layer, group.of_pass] = group.flatten(found.alpha)
        self.sustained[layer, group.of_pass] = group.flatten(found.sustained)


def prefill(
    model: LayeredModel, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, before: Before,
    pause: Pause = no_pause,
) -> PrefilledChunks:  # fmt: skip
    """Compute caches in one pass. Each chunk sees the prefix and itself, but no other chunk.

    before: the result of `entries_before`. The chunks follow one another, R tokens in all. The
    device quantises them together. The results are copied to the host at the end, in a number of
    copies that does not depend on chunks and layers; the host waits only then.

    Raises InvalidChunk as `EntryFormat.check` does.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    n_prefix, n_tokens = before[0][0].shape[2], sum(lengths)
    more = [0] * model.n_more_rows(n_tokens)
    ids = torch.tensor([[*chain.from_iterable(chunk.token_ids for chunk in chunks), *more]])
    positions = [torch.arange(n_prefix, n_prefix + length) for length in (*lengths, len(more))]
    rotation = model.rotation(torch.cat(positions))
    local_runs, middle_runs = _runs(lengths, fingerprint)
    local, form = _LocalQueries(model, rotation, local_runs), entry_format_of(fingerprint)
    encoder = _Encoder(model, form, lengths, middle_runs)
    attention = _ChunkAttention(model, lengths, before)

    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        (query,), (key,), (value,) = query, key, value
        keys = unrotate(key.transpose(0, 1), *rotation.of(layer))[:n_tokens]
        encoder.take(layer, keys, value.transpose(0, 1)[:n_tokens])
        local.take(layer, query)
        return attention(layer, query, key, value, scaling)

    hidden = model.embed(ids)
    for layer in range(model.n_layers):
        pause()
        hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
    entries, key_range, means = encoder.encoded()
    computed = entries, key_range, local.means, attention.alpha, attention.sustained, means
    # From CUDA into pinned memory, one after the other; the host waits for the last copy.
    on_host = [each.to("cpu", non_blocking=True) for each in computed]
    form.check(float(torch.stack(encoder.largest).max()))
    return PrefilledChunks(chunks, fingerprint, on_host)


def _runs(lengths: Sequence[int], fingerprint: Fingerprint) -> tuple[list[range], list[range]]:
    """The rows of each chunk's local tokens, and the rows of each middle block of all chunks."""
    local, middle = list[range](), list[range]()
    for rows, length in zip(_slices(lengths), lengths, strict=True):
        blocks = fingerprint.scheme.of(length)
        local.append(range(rows.start + blocks.local_start, rows.stop))
        spans = map(blocks.span, blocks.middle_blocks)
        middle += [range(rows.start + start, rows.start + stop) for start, stop in spans]
    return local, middle

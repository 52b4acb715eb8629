"""Prefill of chunks: one pass, whose keys and values become chunk caches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    chunk_statistics,
    layer_statistics,
    quantise_means,
)
from samkv_integrations.runtimes.transformers.entries.cache_arrays import cache_of, entry_format_of
from samkv_integrations.runtimes.transformers.entries.quantise import unrotate
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint

BATCH_TOKENS = 1024
DEVICE_BATCH_TOKENS = 2048
"""Tokens of a batch on a CPU and on a device, whose host launches operations meanwhile."""
BATCH_CHUNKS = 32
"""Limits of a batch: while chunks are cached, an answer waits for one batch at most."""

Before = Sequence[tuple[Tensor, Tensor]]
"""Keys and values (1, G, P, D) of the prefix, of each layer."""


def batches(chunks: Sequence[ChunkRef], device: torch.device) -> list[list[ChunkRef]]:
    """Group chunks for one pass each; a longer chunk has a pass of its own.

    At most `BATCH_CHUNKS` a group, as each chunk takes time besides its tokens. Chunks of a group
    have similar lengths on a device, which pads them. On a CPU they fill the group as well as they
    can, as `Model.n_more_rows` pads the group.
    """

    def n_fitting(n_tokens: int) -> int:
        """How many of the ``rest`` have so many tokens at most."""
        return bisect_right(rest, n_tokens, key=lambda chunk: len(chunk.token_ids))

    is_on_cpu = device.type == "cpu"
    rest = sorted(chunks, key=lambda chunk: len(chunk.token_ids))
    grouped: list[list[ChunkRef]] = []
    while rest:
        group, room = list[ChunkRef](), BATCH_TOKENS if is_on_cpu else DEVICE_BATCH_TOKENS
        while rest and len(group) < BATCH_CHUNKS:
            n_found = n_fitting(room)
            if not is_on_cpu and n_found < len(rest):
                n_found = 0  # the next one is too long
            elif is_on_cpu:  # the longest that leaves room for another one
                n_found = n_fitting(room - len(rest[0].token_ids)) or n_found
            if not n_found and group:
                break
            group.append(rest.pop(n_found - 1))
            room -= len(group[-1].token_ids)
        grouped.append(group)
    return grouped


def entries_before(model: LayeredModel, prefix: Sequence[int]) -> Before:
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
            hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
    return before


class PrefilledChunks:
    """The caches of one pass, in host memory. Each is put together when it is asked for.

    So threads that write files do that work, while the next batch is computed.

    computed: on the CPU, for all chunks one behind the other, R tokens: entries (L, R, E), key
    ranges (L, N, 2, G, D), local queries (L, C, H, D), alpha and sustained attention (L, R), and
    means of middle blocks (L, Nm, G, D) float32.
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
            # copies, which do not keep the memory of the whole batch
            entries=entries[:, tokens].clone(), key_range=key_range[:, self._groups[at]].clone(),
            local_query=local_query[:, at].clone(),
            statistics=chunk_statistics(alpha[:, tokens], sustained[:, tokens], self._blocks[at]),
            block_means=quantise_means(means[:, self._means[at]]),
        )  # fmt: skip


def _slices(lengths: Iterable[int]) -> list[slice]:
    """Of parts that follow one another."""
    stops = list(accumulate(lengths, initial=0))
    return [slice(*each) for each in pairwise(stops)]


class _Means:
    """Means over N runs of tokens, without an operation for each run.

    runs: tokens of each run. rows: (N * width,) of the longest run's width; a shorter run repeats
    a token, with weight 0 in ``_weights`` (N, 1, width).
    """

    def __init__(self, runs: Sequence[range], device: torch.device) -> None:
        lengths = torch.tensor([len(run) for run in runs], dtype=torch.long)[:, None]
        first = torch.tensor([run.start for run in runs], dtype=torch.long)[:, None]
        offset = torch.arange(max(map(len, runs), default=0))
        self.rows = (first + torch.minimum(offset, lengths - 1)).flatten().to(device)
        self._weights = ((offset < lengths).float() / lengths)[:, None].to(device)

    def __call__(self, numbers: Tensor) -> Tensor:
        """(..., N, heads, D) float32 means of numbers (..., N * width, heads, D) of ``rows``."""
        *before, _, n_heads, dim = numbers.shape
        n_runs, _, width = self._weights.shape
        numbers = numbers.float().reshape(*before, n_runs, width, n_heads * dim)
        return (self._weights @ numbers).view(*before, n_runs, n_heads, dim)


class _SideBySide:
    """Chunks of a pass as a batch (C, T) of rows; shorter ones are padded to T tokens.

    of_pass: the rows of the pass that they take. n_later: see `layer_statistics`.
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
        """(heads, R, D) of a pass as (C, heads, T, D); of one chunk without a copy."""
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


_ENCODED = 2**24
"""Numbers of keys that are quantised at a time on a device. On a CPU a layer is, which fits its
cache."""


def prefill(
    model: LayeredModel, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, before: Before
) -> PrefilledChunks:
    """Compute caches in one pass; a chunk sees the prefix and itself, no other chunk.

    before: of `entries_before`. The chunks stand one behind the other, R tokens in all. The device
    quantises them together. What is computed is copied to the host once, in so many copies for any
    number of chunks and layers, which is the only time that the host waits.

    Raises InvalidChunk as `EntryFormat.check` does.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    n_prefix, n_tokens = before[0][0].shape[2], sum(lengths)
    on_cpu = model.device.type == "cpu"
    more = [0] * model.n_more_rows(n_tokens)
    ids = torch.tensor([[*chain.from_iterable(chunk.token_ids for chunk in chunks), *more]])
    positions = [torch.arange(n_prefix, n_prefix + length) for length in (*lengths, len(more))]
    rotation = model.rotation(torch.cat(positions))
    local_runs, middle_runs = list[range](), list[range]()
    for span, length in zip(_slices(lengths), lengths, strict=True):
        blocks = fingerprint.scheme.of(length)
        local_runs.append(range(span.start + blocks.local_start, span.stop))
        spans = map(blocks.span, blocks.middle_blocks)
        middle_runs += [range(span.start + start, span.start + stop) for start, stop in spans]
    # A launch on a device takes longer than padding. A CPU computes chunk by chunk.
    firsts = [span.start for span in _slices(lengths)] if on_cpu else [0]
    parts = [[length] for length in lengths] if on_cpu else [lengths]
    local, groups = dict[torch.device, _Means](), dict[torch.device, list[_SideBySide]]()
    for device in set(model.layer_devices):
        local[device] = _Means(local_runs, device)
        groups[device] = [
            _SideBySide(first, part, device) for first, part in zip(firsts, parts, strict=True)
        ]

    turns = []
    for cos, sin in rotation.turns:
        at = local[cos.device].rows
        turns.append((cos.index_select(0, at), sin.index_select(0, at)))
    of_local = replace(rotation, turns=turns)

    # local queries (L, C, H, D), statistics (L, R)
    kind: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    local_query = torch.empty(model.n_layers, len(chunks), model.n_heads, model.head_dim, **kind)
    alpha, sustained = (
        torch.empty(model.n_layers, n_tokens, dtype=torch.float32, device=model.device)
        for _ in range(2)
    )

    middle, form = _Means(middle_runs, model.device), entry_format_of(fingerprint)
    n_numbers = n_tokens * model.n_kv_heads * model.head_dim
    together = 1 if on_cpu else max(1, _ENCODED // n_numbers)
    of_keys, of_values = list[Tensor](), list[Tensor]()  # (R, G, D) of layers that come next
    encoded, of_middle = list[tuple[Tensor, Tensor, Tensor]](), list[Tensor]()

    def encode() -> None:
        keys, values = torch.stack(of_keys), torch.stack(of_values)
        rows = keys.flatten(0, 1), values.flatten(0, 1)
        encoded.append(form.encode_chunks(*rows, lengths * len(keys)))
        of_middle.append(middle(keys.index_select(1, middle.rows)))
        of_keys.clear()
        of_values.clear()

    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        (query,), (key,), (value,) = query, key, value
        cos, sin = rotation.of(layer)
        of_keys.append(unrotate(key.transpose(0, 1), cos, sin)[:n_tokens].to(model.device))
        of_values.append(value.transpose(0, 1)[:n_tokens].to(model.device))
        if len(of_keys) == together or layer == model.n_layers - 1:
            encode()
        means = local[query.device]
        local_queries = query.transpose(0, 1).index_select(0, means.rows).float()
        local_query[layer] = means(unrotate(local_queries, *of_local.of(layer)))
        ends = model.ends_at(layer)
        output = torch.empty_like(query)
        output[:, n_tokens:] = 0
        for group in groups[query.device]:
            own, *rest = map(group.stack, (query, key, value))
            keys, values = (
                torch.cat((first.expand(len(side), -1, -1, -1), side), dim=2)
                for first, side in zip(before[layer], rest, strict=True)
            )
            mask = model.window_mask(layer, keys.shape[2])
            is_plain = mask is None and model.scores_plainly
            attended = group.stack(output)  # of one chunk a view
            found = layer_statistics(
                own, keys, scaling, n_later=group.n_later, n_prefix=n_prefix,
                tile=64 if on_cpu else 256,  # a CPU's cache holds the smaller tile
                value=values if is_plain and not ends else None, out=attended,
            )  # fmt: skip
            if not is_plain and not ends:
                # as many queries as keys, so that causal attention needs no mask
                padded = pad(own, (0, 0, n_prefix, 0))
                whole = model.attention(layer, padded, keys, values, scaling, mask, mask is None)
                attended[:] = whole[:, :, n_prefix:]
            if len(own) > 1:
                output[:, group.of_pass] = group.flatten(attended.transpose(1, 2)).transpose(0, 1)
            alpha[layer, group.of_pass] = group.flatten(found.alpha)
            sustained[layer, group.of_pass] = group.flatten(found.sustained)
        return None if ends else output[None]

    hidden = model.embed(ids)
    for layer in range(model.n_layers):
        hidden = model.layer(layer, hidden, *rotation.of(layer), attend)

    entries, key_range, largest = (list(each) for each in zip(*encoded, strict=True))
    n_groups = sum(form.range_shape(length)[0] for length in lengths)
    computed = (
        torch.cat(entries).view(model.n_layers, n_tokens, -1),
        torch.cat(key_range).view(model.n_layers, n_groups, *form.range_shape(0)[1:]),
        local_query, alpha, sustained, torch.cat(of_middle),
    )  # fmt: skip
    # From CUDA into pinned memory, one after the other; the host waits at the last.
    on_host = [each.to("cpu", non_blocking=True) for each in computed]
    form.check(float(torch.stack(largest).max()))
    return PrefilledChunks(chunks, fingerprint, on_host)

"""One ordinary prefill of chunks, each alone, captured into chunk caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.cache.attention_stats import (
    LayerStatistics,
    chunk_statistics,
    layer_statistics,
    quantise_means,
)
from samkv_integrations.cache.chunk import ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.cache.quantise import unrotate
from samkv_integrations.model.attention import Attend
from samkv_integrations.model.families import Rotation
from samkv_integrations.model.model import Model

BATCH_TOKENS = 1024
BATCH_CHUNKS = 32
"""An answer that is due while chunks are cached waits for a batch of them."""
PADDING = 1.1
"""Most tokens of a batch, padding included, over those of its chunks."""

Before = Sequence[tuple[Tensor, Tensor]]
"""Keys and values (1, G, P, D) of what stands before each chunk, of each layer."""


def batches(chunks: Sequence[ChunkRef], budget_tokens: int = BATCH_TOKENS) -> list[list[ChunkRef]]:
    """Chunks of similar length together, at most ``budget_tokens`` padded tokens a batch.

    Not more than `PADDING` allows: what is computed for nothing is in no estimate of `costs`. And
    at most `BATCH_CHUNKS`, each of which takes time of its own.
    """
    grouped: list[list[ChunkRef]] = []
    n_tokens = 0
    for chunk in sorted(chunks, key=lambda c: len(c.token_ids), reverse=True):
        length = len(chunk.token_ids)
        padded = (len(grouped[-1]) + 1) * len(grouped[-1][0].token_ids) if grouped else 0
        is_full = bool(grouped) and len(grouped[-1]) == BATCH_CHUNKS
        if not grouped or is_full or padded > min(budget_tokens, PADDING * (n_tokens + length)):
            grouped.append([])
            n_tokens = 0
        grouped[-1].append(chunk)
        n_tokens += length
    return grouped


def entries_before(model: Model, prefix: Sequence[int]) -> Before:
    """The entries of a prefix, by its token ids, once for all chunks."""
    shape = (1, model.n_kv_heads, 0, model.head_dim)
    empty = [torch.empty(shape, dtype=model.dtype, device=where) for where in model.layer_devices]
    before = list(zip(empty, empty, strict=True))

    def keep(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        before[layer] = key, value
        mask = model.window_mask(layer, n_prefix)
        return model.attention(layer, query, key, value, scaling, mask, mask is None)

    if n_prefix := len(prefix):
        rotation = model.rotation(torch.arange(n_prefix))
        _pass(model, model.embed(torch.tensor([prefix])), rotation, keep)
    return before


def prefill(
    model: Model, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, before: Before
) -> list[ChunkCache]:
    """Caches of ``chunks``, from one padded pass in which each sees the prefix and itself alone."""
    n_prefix = before[0][0].shape[2]
    length = max(len(chunk.token_ids) for chunk in chunks)
    ids = torch.zeros(len(chunks), length, dtype=torch.long)
    for row, chunk in zip(ids, chunks, strict=True):
        row[: len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
    rotation = model.rotation(torch.arange(n_prefix, n_prefix + length))
    capture = _Capture(model, chunks, fingerprint, before, rotation)
    _pass(model, model.embed(ids), rotation, capture)
    return [capture.cache_of(index) for index in range(len(chunks))]


def _pass(model: Model, hidden: Tensor, rotation: Rotation, attend: Attend) -> None:
    """Run all layers on hidden (batch, R, hidden); rotation: of the R positions."""
    for layer in range(model.n_layers):
        hidden = model.layer(layer, hidden, *rotation.of(layer), attend)


class _Capture:
    """Takes keys, values, local queries and attention statistics out of each layer as it runs.

    Padding stands at the end, where causal attention never lets a real token see it.

    rotation: of the T positions of the longest chunk.
    """

    def __init__(
        self,
        model: Model,
        chunks: Sequence[ChunkRef],
        fingerprint: Fingerprint,
        before: Before,
        rotation: Rotation,
    ) -> None:
        self._chunks, self._fingerprint, self._before = chunks, fingerprint, before
        self._model, self._rotation = model, rotation
        shapes = [
            (model.n_layers, len(chunk.token_ids), model.n_kv_heads, model.head_dim)
            for chunk in chunks
        ]
        self._keys = [torch.empty(shape, dtype=model.dtype) for shape in shapes]
        self._values = [torch.empty(shape, dtype=model.dtype) for shape in shapes]
        queries = (model.n_layers, model.n_heads, model.head_dim)
        self._local_query = [torch.empty(queries, dtype=model.dtype) for _ in chunks]
        self._statistics: list[list[LayerStatistics]] = [[] for _ in chunks]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = (
            torch.cat((first.expand(len(rest), -1, -1, -1), rest), dim=2)
            for first, rest in zip(self._before[layer], (key, value), strict=True)
        )
        n_prefix = keys.shape[2] - key.shape[2]
        all_cos, all_sin = self._rotation.of(layer)
        for index, chunk in enumerate(self._chunks):
            stop = len(chunk.token_ids)
            cos, sin = all_cos[:stop], all_sin[:stop]
            self._keys[index][layer] = unrotate(key[index, :, :stop].transpose(0, 1), cos, sin)
            self._values[index][layer] = value[index, :, :stop].transpose(0, 1)
            local = self._fingerprint.scheme.of(stop).local_start
            local_queries = query[index, :, local:stop].transpose(0, 1).float()
            self._local_query[index][layer] = unrotate(
                local_queries, cos[local:], sin[local:]
            ).mean(0)
            self._statistics[index].append(
                layer_statistics(
                    query[index, :, :stop],
                    keys[index, :, : n_prefix + stop],
                    scaling,
                    n_prefix=n_prefix,
                    tile=256 if query.is_cuda else 64,  # a CPU's cache holds the smaller tile
                )
            )
        # As many queries as keys, so that causal attention needs no mask.
        padded = pad(query, (0, 0, n_prefix, 0))
        mask = self._model.window_mask(layer, keys.shape[2])
        output = self._model.attention(layer, padded, keys, values, scaling, mask, mask is None)
        return output[:, :, n_prefix:]

    def cache_of(self, index: int) -> ChunkCache:
        chunk, keys = self._chunks[index], self._keys[index]
        blocks = self._fingerprint.scheme.of(len(chunk.token_ids))
        form, values = self._fingerprint.entry_format, self._values[index]
        # Layer by layer: float32 copies of all keys would be the largest tensors of the ingest.
        entries, key_range = map(torch.stack, zip(*map(form.encode, keys, values), strict=True))
        return ChunkCache(
            key=chunk.key,
            fingerprint=self._fingerprint,
            text=chunk.text,
            token_ids=torch.tensor(chunk.token_ids, dtype=torch.int32),
            entries=entries,
            key_range=key_range,
            local_query=self._local_query[index],
            statistics=chunk_statistics(self._statistics[index], blocks),
            block_means=quantise_means(keys, blocks),
        )

"""Prefill of chunks: one pass, whose keys and values become chunk caches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Literal

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
from samkv_integrations.cache.formats.quantise import unrotate
from samkv_integrations.model.model import Model

PrefixPolicy = Literal["auto", "documents", "bos", "none"]

DOCUMENTS_BEFORE = (
    "[Lake Varen]\nLake Varen is a lake in the north of the country. It is about twelve kilometres "
    "long and is fed by three rivers.\n\n[Anna Holm]\nAnna Holm (born 4 May 1931) was a writer and "
    "teacher. She published nine novels and two collections of poems.\n\n"
)
"""Two made-up documents. A chunk that is prefilled after them has the entries of one document of
several, as in a prompt. They halve what `reuse` loses on short chunks of SmolLM2
(docs/decisions.md)."""

BATCH_TOKENS = 1024
BATCH_CHUNKS = 32
"""Limits of a batch: while chunks are cached, an answer waits for one batch at most."""

Before = Sequence[tuple[Tensor, Tensor]]
"""Keys and values (1, G, P, D) of the prefix, of each layer."""


def prefix_ids(model: Model, prefix: PrefixPolicy, prefix_text: str) -> tuple[int, ...]:
    """The token ids that an engine's ``prefix`` and ``prefix_text`` stand for.

    A text takes the place of the documents. BOS comes first, unless the model has none or
    ``prefix`` is ``"none"``. ``"auto"`` is ``"documents"``.
    """
    bos = () if prefix == "none" or model.bos_id is None else (model.bos_id,)
    if prefix_text:
        return (*bos, *model.tokenize(prefix_text, special=True))
    if prefix in ("bos", "none"):
        return bos
    return (*bos, *model.tokenize(DOCUMENTS_BEFORE, special=False))


def batches(chunks: Sequence[ChunkRef]) -> list[list[ChunkRef]]:
    """Group chunks, in order, for one pass each; a longer chunk has a pass of its own.

    At most `BATCH_CHUNKS` a group, as each chunk takes time besides its tokens.
    """
    grouped: list[list[ChunkRef]] = []
    n_tokens = 0
    for chunk in chunks:
        n_tokens += len(chunk.token_ids)
        if not grouped or n_tokens > BATCH_TOKENS or len(grouped[-1]) == BATCH_CHUNKS:
            grouped.append([])
            n_tokens = len(chunk.token_ids)
        grouped[-1].append(chunk)
    return grouped


def entries_before(model: Model, prefix: Sequence[int]) -> Before:
    """The entries of a prefix, by its token ids, computed once for all chunks."""
    shape = (1, model.n_kv_heads, 0, model.head_dim)
    empty = [torch.empty(shape, dtype=model.dtype, device=where) for where in model.layer_devices]
    before = list(zip(empty, empty, strict=True))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        before[layer] = key[:, :, :n_prefix], value[:, :, :n_prefix]
        mask = model.window_mask(layer, len(ids))
        return model.attention(layer, query, key, value, scaling, mask, mask is None)

    if n_prefix := len(prefix):
        ids = [*prefix, *([0] * model.n_more_rows(n_prefix))]
        rotation = model.rotation(torch.arange(len(ids)))
        hidden = model.embed(torch.tensor([ids]))
        for layer in range(model.n_layers):
            hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
    return before


def prefill(
    model: Model, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, before: Before
) -> list[ChunkCache]:
    """Compute caches in one pass; a chunk sees the prefix and itself, no other chunk.

    before: of `entries_before`. The chunks stand one behind the other, R tokens in all.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    stops = list(accumulate(lengths))
    spans = [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]
    n_prefix, n_tokens = before[0][0].shape[2], stops[-1]
    more = [0] * model.n_more_rows(n_tokens)
    ids = torch.tensor([[*chain.from_iterable(chunk.token_ids for chunk in chunks), *more]])
    positions = [torch.arange(n_prefix, n_prefix + length) for length in (*lengths, len(more))]
    rotation = model.rotation(torch.cat(positions))
    blocks = [fingerprint.scheme.of(length) for length in lengths]
    n_local = [length - of.local_start for length, of in zip(lengths, blocks, strict=True)]
    local = torch.cat(
        [torch.arange(stop - n, stop) for stop, n in zip(stops, n_local, strict=True)]
    )

    # un-rotated keys, and values (L, R, G, D), local queries (L, C, H, D), statistics of each chunk
    shape = (model.n_layers, n_tokens, model.n_kv_heads, model.head_dim)
    of_keys, of_values = (torch.empty(shape, dtype=model.dtype) for _ in range(2))
    shape = (model.n_layers, len(chunks), model.n_heads, model.head_dim)
    local_query = torch.empty(shape, dtype=model.dtype)
    statistics: list[list[LayerStatistics]] = [[] for _ in chunks]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        (query,), (key,), (value,) = query, key, value
        cos, sin = rotation.of(layer)
        of_keys[layer] = unrotate(key.transpose(0, 1), cos, sin)[:n_tokens]
        of_values[layer] = value.transpose(0, 1)[:n_tokens]
        at = local.to(query.device)
        local_queries = unrotate(query[:, at].transpose(0, 1).float(), cos[at], sin[at])
        local_query[layer] = torch.stack(
            [part.mean(0) for part in torch.split(local_queries, n_local)]
        )
        output = torch.zeros_like(query)
        for span, of_chunk in zip(spans, statistics, strict=True):
            keys, values = (
                torch.cat((first[0], rest[:, span]), dim=1)
                for first, rest in zip(before[layer], (key, value), strict=True)
            )
            mask = model.window_mask(layer, keys.shape[1])
            is_plain = mask is None and model.scores_plainly
            of_layer = layer_statistics(
                query[:, span], keys, scaling, n_prefix=n_prefix,
                tile=256 if query.is_cuda else 64,  # a CPU's cache holds the smaller tile
                value=values if is_plain else None, out=output[:, span],
            )  # fmt: skip
            of_chunk.append(of_layer)
            if not is_plain:
                # as many queries as keys, so that causal attention needs no mask
                padded = pad(query[None, :, span], (0, 0, n_prefix, 0))
                whole = model.attention(
                    layer, padded, keys[None], values[None], scaling, mask, mask is None
                )
                output[:, span] = whole[0, :, n_prefix:]
        return output[None]

    hidden = model.embed(ids)
    for layer in range(model.n_layers):
        hidden = model.layer(layer, hidden, *rotation.of(layer), attend)

    caches = []
    for at, (chunk, span) in enumerate(zip(chunks, spans, strict=True)):
        # layer by layer, as float32 copies of all keys would be the largest tensors of the ingest
        encoded = map(fingerprint.entry_format.encode, of_keys[:, span], of_values[:, span])
        entries, key_range = map(torch.stack, zip(*encoded, strict=True))
        cache = ChunkCache(
            key=chunk.key, fingerprint=fingerprint, text=chunk.text,
            token_ids=torch.tensor(chunk.token_ids, dtype=torch.int32),
            entries=entries, key_range=key_range, local_query=local_query[:, at].contiguous(),
            statistics=chunk_statistics(statistics[at], blocks[at]),
            block_means=quantise_means(of_keys[:, span], blocks[at]),
        )  # fmt: skip
        caches.append(cache)
    return caches

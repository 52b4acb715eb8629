"""Prefill of chunks: one padded pass, whose keys and values become chunk caches."""

from __future__ import annotations

from collections.abc import Sequence
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
PADDING = 1.1
"""Limit of the tokens of a batch with padding, over those without."""

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


def batches(chunks: Sequence[ChunkRef], budget_tokens: int = BATCH_TOKENS) -> list[list[ChunkRef]]:
    """Group chunks of similar length, at most ``budget_tokens`` padded tokens in a batch.

    At most `PADDING`, as estimates of cost leave padding out, and at most `BATCH_CHUNKS`, as each
    chunk takes time besides its tokens.
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
    """The entries of a prefix, by its token ids, computed once for all chunks."""
    shape = (1, model.n_kv_heads, 0, model.head_dim)
    empty = [torch.empty(shape, dtype=model.dtype, device=where) for where in model.layer_devices]
    before = list(zip(empty, empty, strict=True))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        before[layer] = key, value
        mask = model.window_mask(layer, n_prefix)
        return model.attention(layer, query, key, value, scaling, mask, mask is None)

    if n_prefix := len(prefix):
        rotation = model.rotation(torch.arange(n_prefix))
        hidden = model.embed(torch.tensor([prefix]))
        for layer in range(model.n_layers):
            hidden = model.layer(layer, hidden, *rotation.of(layer), attend)
    return before


def prefill(
    model: Model, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, before: Before
) -> list[ChunkCache]:
    """Compute caches in one padded pass; a chunk sees the prefix and itself, no other chunk.

    before: of `entries_before`. Padding stands at the end, where causal attention hides it from
    all real tokens.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    n_prefix, longest = before[0][0].shape[2], max(lengths)
    ids = torch.zeros(len(chunks), longest, dtype=torch.long)
    for row, chunk in zip(ids, chunks, strict=True):
        row[: len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
    rotation = model.rotation(torch.arange(n_prefix, n_prefix + longest))
    blocks = [fingerprint.scheme.of(length) for length in lengths]

    # of each chunk: un-rotated keys, and values (L, T, G, D), local queries (L, H, D), statistics
    of_keys, of_values = (
        [
            torch.empty(model.n_layers, length, model.n_kv_heads, model.head_dim, dtype=model.dtype)
            for length in lengths
        ]
        for _ in range(2)
    )
    shape = (model.n_layers, model.n_heads, model.head_dim)
    local_query = [torch.empty(shape, dtype=model.dtype) for _ in chunks]
    statistics: list[list[LayerStatistics]] = [[] for _ in chunks]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = (
            torch.cat((first.expand(len(rest), -1, -1, -1), rest), dim=2)
            for first, rest in zip(before[layer], (key, value), strict=True)
        )
        all_cos, all_sin = rotation.of(layer)
        for at, stop in enumerate(lengths):
            cos, sin, local = all_cos[:stop], all_sin[:stop], blocks[at].local_start
            of_keys[at][layer] = unrotate(key[at, :, :stop].transpose(0, 1), cos, sin)
            of_values[at][layer] = value[at, :, :stop].transpose(0, 1)
            local_queries = query[at, :, local:stop].transpose(0, 1).float()
            local_query[at][layer] = unrotate(local_queries, cos[local:], sin[local:]).mean(0)
            of_layer = layer_statistics(
                query[at, :, :stop], keys[at, :, : n_prefix + stop], scaling, n_prefix=n_prefix,
                tile=256 if query.is_cuda else 64,  # a CPU's cache holds the smaller tile
            )  # fmt: skip
            statistics[at].append(of_layer)
        # as many queries as keys, so that causal attention needs no mask
        padded = pad(query, (0, 0, n_prefix, 0))
        mask = model.window_mask(layer, keys.shape[2])
        output = model.attention(layer, padded, keys, values, scaling, mask, mask is None)
        return output[:, :, n_prefix:]

    hidden = model.embed(ids)
    for layer in range(model.n_layers):
        hidden = model.layer(layer, hidden, *rotation.of(layer), attend)

    caches = []
    for at, chunk in enumerate(chunks):
        # layer by layer, as float32 copies of all keys would be the largest tensors of the ingest
        encoded = map(fingerprint.entry_format.encode, of_keys[at], of_values[at])
        entries, key_range = map(torch.stack, zip(*encoded, strict=True))
        cache = ChunkCache(
            key=chunk.key, fingerprint=fingerprint, text=chunk.text,
            token_ids=torch.tensor(chunk.token_ids, dtype=torch.int32),
            entries=entries, key_range=key_range, local_query=local_query[at],
            statistics=chunk_statistics(statistics[at], blocks[at]),
            block_means=quantise_means(of_keys[at], blocks[at]),
        )  # fmt: skip
        caches.append(cache)
    return caches

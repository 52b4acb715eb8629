"""Statistics of a chunk's attention to itself, for its tokens and blocks.

They are computed once, at ingest, from a prefill of the chunk alone, on the device of the inputs.
docs/architecture.md has the legend of shapes; P is the number of prefix tokens before the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    BlockMeans,
    ChunkStatistics,
)
from samkv_integrations.runtimes.transformers.entries.quantise import HALF_STEP, as_half
from samkv_integrations.store.chunk import ChunkBlocks

MIN_LATER = 8
"""Fewest later tokens for which a power law is fitted to a token's column."""

ATTENTION_FLOOR = 1e-8
"""Least attention in the fit: the logarithm of an underflow would dominate its column."""

MIN_PAUTA = 11
"""Fewest values for a 3-sigma test: of n values, none is beyond sqrt(n - 1) standard deviations."""

_ROWS = 256
"""Queries whose attention is counted at a time, at least as many as are computed at a time."""

MIN_CHUNKS = 32
"""Fewest chunks whose votes decide a model's stable layers."""

PUBLISHED_STABLE_LAYERS: Mapping[tuple[str, int, int, int], tuple[int, ...]] = {
    ("qwen2", 36, 2048, 2): tuple(range(31, 36)),  # Qwen2.5-3B-Instruct
    ("mistral", 32, 4096, 8): tuple(range(27, 32)),  # Mistral-7B-Instruct
    ("llama", 32, 4096, 8): tuple(range(28, 32)),  # Llama-3.1-8B-Instruct
}
"""(model type, layers, hidden size, key-value heads) -> the stable layers that the paper reports
(Appendix A.2), counted from 0 here and from 1 in the paper."""


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """How the attention to each token of C chunks decays with distance, in one layer.

    alpha: (C, T) float32, exponent of the power law a ~ x^-alpha, fitted to the attention from the
    tokens x = 1, 2, ... places later; a small one means lasting attention. nan if fewer than
    `MIN_LATER` tokens follow.
    sustained: (C, T) float32, mean attention from all later tokens; nan for the last token.
    """

    alpha: Tensor
    sustained: Tensor


@torch.no_grad()
def layer_statistics(
    query: Tensor, key: Tensor, scaling: float, *, n_later: Tensor, n_prefix: int = 0,
    tile: int = 256, value: Tensor | None = None, out: Tensor | None = None,
) -> LayerStatistics:  # fmt: skip
    """Statistics of each chunk's causal attention to itself, mean over heads (paper: Appendix A.1).

    query: (C, H, T, D), key: (C, G, P + T, D), both rotated as in the prefill; consecutive query
    heads share a key-value head. The first ``n_prefix`` keys take part in the softmax and get no
    statistics. ``scaling`` multiplies the logits.
    n_later: (C, T) int64, how many tokens of its chunk follow each token. It is negative in the
    padding of a chunk shorter than T: padding may be any finite numbers, and is not counted.
    value: (C, G, P + T, D), or None. With values, ``out`` (C, H, T, D) is filled with the
    attention's output, so that a layer computes its scores once.

    The softmax runs in float32 over ``tile`` queries at a time. One pass is enough, because the
    least-squares slope of a column is linear in its logarithms: with u = log x,
    slope = sum((u - mean u) log a) / sum((u - mean u)^2), and both moments of u depend only on the
    number of later tokens.
    """
    n_chunks, n_heads, n_tokens, dim = query.shape
    n_kv_heads = key.shape[1]
    assert key.shape == (n_chunks, n_kv_heads, n_prefix + n_tokens, dim)
    assert n_heads % n_kv_heads == 0
    device = query.device
    n_groups = n_chunks * n_kv_heads
    keys = key.float().flatten(0, 1).mT
    values = None if value is None else value.flatten(0, 1)
    mean_u, spread_u = (m[n_later.clamp(min=0)] for m in _log_distances(n_tokens, device))
    is_token = (n_later >= 0).float()[..., None] if n_chunks > 1 else None
    u, hidden = _distances(n_tokens, device)
    received = torch.zeros(n_chunks, n_tokens, dtype=torch.float32, device=device)
    slope = torch.zeros_like(received)
    # Each operation is so small that the number of operations decides the time.
    for first in range(0, n_tokens, _ROWS):
        last = min(first + _ROWS, n_tokens)
        attention = received.new_zeros(n_chunks, last - first, last)  # mean over heads
        for start in range(first, last, tile):
            stop = min(start + tile, last)
            n_rows, n_seen = stop - start, n_prefix + stop
            # Keys after the tile are masked for all its queries; omitting them halves the work.
            # Heads of one group are consecutive, so they stack over their common key head.
            rows = query[:, :, start:stop]
            grouped = rows.to(keys.dtype, memory_format=torch.contiguous_format)
            grouped = grouped.reshape(n_groups, -1, dim)
            logits = grouped.new_empty(n_groups, grouped.shape[1], n_seen)
            torch.baddbmm(logits, grouped, keys[..., :n_seen], beta=0, alpha=scaling, out=logits)
            logits = logits.view(n_chunks, n_heads, n_rows, n_seen)
            logits[..., n_prefix + start :].add_(hidden[:n_rows, :n_rows])
            weights = logits.softmax(-1)
            if values is not None and out is not None:
                grouped = weights.to(values.dtype).view(n_groups, -1, n_seen)
                output = torch.bmm(grouped, values[:, :n_seen])
                out[:, :, start:stop] = output.view(n_chunks, n_heads, n_rows, -1)
            of_tile = attention[:, start - first : stop - first, :stop]
            torch.sum(weights[..., n_prefix:], 1, out=of_tile)
        attention.div_(n_heads)
        own = attention[..., first:]
        own.tril_(-1)  # attention from later tokens only
        if is_token is not None:
            attention *= is_token[:, first:last]
        received[:, :last].add_(attention.sum(1))
        log_attention = attention.clamp_(min=ATTENTION_FLOOR).log_()
        own.tril_(-1)
        if is_token is not None:
            log_attention *= is_token[:, first:last]
        nearest = u.shape[1] - _ROWS - first  # the column of u that is the chunk's first token
        centred_u = u[: last - first, nearest : nearest + last] - mean_u[:, None, :last]
        slope[:, :last].add_(centred_u.mul_(log_attention).sum(1))
    # Short columns become nan: spread_u is nan there, and so is 0 / 0.
    return LayerStatistics(alpha=-slope / spread_u, sustained=received / n_later)


@lru_cache(maxsize=4)
def _distances(n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two float32 tables for `_ROWS` queries at a time.

    (_ROWS, n + _ROWS) logarithms of the distances from the queries to the last n + _ROWS keys, 0
    for keys at or after the query; and (_ROWS, _ROWS) the mask that hides later tokens.
    """
    n_before = -(-n_tokens // _ROWS) * _ROWS
    rows = torch.arange(_ROWS, device=device)[:, None]
    distance = n_before + rows - torch.arange(n_before + _ROWS, device=device)
    hidden = torch.full((_ROWS, _ROWS), -torch.inf, device=device).triu_(1)
    return distance.clamp(min=1).log(), hidden


@lru_cache(maxsize=32)
def _log_distances(n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Moments of u = log x for the fit, for n = 0 to T - 1 later tokens, (T,) float32 each.

    The mean of u over x = 1 ... n; the sum of squared deviations from that mean, nan where n is
    below `MIN_LATER`.
    """
    count = torch.arange(n_tokens, dtype=torch.float64)
    u = count.clamp(min=1).log()
    mean = u.cumsum(0) / count.clamp(min=1)
    spread = u.square().cumsum(0) - count * mean.square()
    spread[:MIN_LATER] = torch.nan
    return mean.to(device, torch.float32), spread.to(device, torch.float32)


def chunk_statistics(alpha: Tensor, sustained: Tensor, blocks: ChunkBlocks) -> ChunkStatistics:
    """Leading and trailing blocks, outlier tokens and stable layers of a chunk, on the CPU.

    alpha, sustained: (L, T), of `LayerStatistics` in each layer.

    Importance of a block (Appendix A.1): the smallest alpha among its tokens; smallest first.
    Unimportance: the highest sustained attention among its tokens; lowest first. In both orders,
    blocks without such a token come last, and the lowest index wins a tie.
    Outlier tokens: alpha below mean - 3 sigma over all alphas of the layer (PauTa criterion).
    Stable layers (Appendix A.2): blocks that have an alpha, anchors included, are ranked by
    importance in each layer. The block with the best mean rank leads the chunk. A layer is stable
    if the leading block's alpha is below mean - 3 sigma over the layer's blocks. A chunk with fewer
    than `MIN_PAUTA` such blocks has no stable layer.
    """
    assert alpha.shape[1] == blocks.n_tokens
    importance = _by_block(alpha.nan_to_num(nan=torch.inf), blocks, torch.inf).amin(2)  # (L, N)
    prominence = _by_block(sustained.nan_to_num(nan=-torch.inf), blocks, -torch.inf).amax(2)
    prominence = prominence.masked_fill(prominence == -torch.inf, torch.inf)
    size, inside = blocks.scheme.size, blocks.middle_blocks
    middle = slice(inside.start * size, inside.stop * size)
    outliers = torch.zeros_like(alpha, dtype=torch.bool)
    outliers[:, middle] = alpha[:, middle] < _pauta_limit(alpha)
    return ChunkStatistics(
        block_max=_lowest_middle(importance, blocks),
        block_min=_lowest_middle(prominence, blocks),
        outliers=outliers,
        stable=_stable(importance),
    )


def _by_block(values: Tensor, blocks: ChunkBlocks, fill: float) -> Tensor:
    """(L, T) values as (L, N, B), a short last block padded with ``fill``."""
    n_blocks, size = blocks.n_blocks, blocks.scheme.size
    padded = pad(values, (0, n_blocks * size - blocks.n_tokens), value=fill)
    return padded.view(-1, n_blocks, size)


def _lowest_middle(values: Tensor, blocks: ChunkBlocks) -> Tensor:
    """(L,) int32 index of the middle block with the lowest (L, N) value; -1 without a middle."""
    middle = blocks.middle_blocks
    if not middle:
        return torch.full((values.shape[0],), -1, dtype=torch.int32)
    lowest = values[:, middle.start : middle.stop].argmin(1)  # argmin returns the first of a tie
    return (lowest + middle.start).to(torch.int32)


def _pauta_limit(values: Tensor) -> Tensor:
    """(L, 1) float64 mean - 3 population sigma of the (L, n) values, nan ignored.

    The limit is nan, so that no value is below it, for fewer than `MIN_PAUTA` values: only rounding
    could put one of them beyond a limit.
    """
    values = values.double()
    mean = values.nanmean(1, keepdim=True)
    sigma = (values - mean).square().nanmean(1, keepdim=True).sqrt()
    enough = values.isfinite().sum(1, keepdim=True) >= MIN_PAUTA
    return (mean - 3 * sigma).where(enough, torch.nan)


def _stable(importance: Tensor) -> Tensor:
    """(L,) bool, the stable layers. importance: (L, N); inf for a block without alpha."""
    ranked = importance[:, importance.isfinite().all(0)]
    if ranked.shape[1] < MIN_PAUTA:
        return torch.zeros(ranked.shape[0], dtype=torch.bool)
    ranks = ranked.argsort(dim=1, stable=True).argsort(dim=1)
    leading = ranks.sum(0).argmin()
    return ranked[:, leading] < _pauta_limit(ranked)[:, 0]


def stable_layers(n_layers: int, votes: Tensor | None) -> tuple[int, ...]:
    """The stable layers N* of a model without published ones, counted from 0 (Appendix A.2).

    With `MIN_CHUNKS` chunks or more, these are the layers of the last quarter whose votes are at
    least the mean over all layers, and not zero: the paper finds stability in the last few layers
    of every model. With fewer chunks, or if no layer qualifies, the last eighth of the layers.

    votes: (number of chunks, L) bool, ``stable`` of the model's chunks; None without chunks.
    """
    if votes is not None and votes.shape[0] >= MIN_CHUNKS:
        assert votes.shape[1] == n_layers
        counts: list[int] = votes.sum(0).tolist()
        total = sum(counts)
        tail = range(n_layers - max(1, n_layers // 4), n_layers)
        # Whole numbers on both sides, so that equal shares compare as equal.
        chosen = tuple(n for n in tail if counts[n] > 0 and counts[n] * n_layers >= total)
        if chosen:
            return chosen
    return tuple(range(n_layers - max(1, n_layers // 8), n_layers))


# -- mean keys of blocks --------------------------------------------------------------------------


def quantise_means(means: Tensor) -> BlockMeans:
    """Means of middle blocks (L, Nm, G, D) in int8."""
    # Half a step is added because a subnormal float16 scale could be rounded down by more than
    # half a code, and to 0.
    scale = as_half(means.abs().amax(-1) / 127 + HALF_STEP)
    codes = (means / scale.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return BlockMeans(codes=codes, scale=scale)


def mean_of_blocks(entries: Tensor, lengths: Tensor) -> Tensor:
    """(L, N, G, D) float32 mean of entries (L, T, G, D) over blocks of ``lengths`` (N,) tokens."""
    n_layers, _, *shape = entries.shape
    block = torch.arange(len(lengths)).repeat_interleave(lengths).to(entries.device)
    total = entries.new_zeros(n_layers, len(lengths), *shape, dtype=torch.float32)
    counts = lengths.clamp(min=1).to(entries.device)  # the mean of a block without tokens is 0
    return total.index_add_(1, block, entries.float()) / counts[:, None, None]


def decode_means(block_means: BlockMeans) -> Tensor:
    """(L, Nm, G, D) float32 mean un-rotated key of each middle block."""
    return block_means.codes.float() * block_means.scale.float()[..., None]

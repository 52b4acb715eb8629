"""Random chunk caches and fingerprints: the right shapes, any content."""

from __future__ import annotations

import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.transformers.entries import cache_arrays
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    BlockMeans,
    ChunkStatistics,
    dtype_of,
    entry_format_of,
    key_range,
)
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat, groups
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint, normalise

TINY = Fingerprint(
    model="tiny",
    weights="w0",
    config="c0",
    tokenizer="t0",
    dtype="float32",
    rope="default",
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    prefix="",
    block_size=4,
    n_init=1,
    n_local=2,
    store_bits=4,
)
"""Of a model that needs a few bytes a token."""


def encoded(form: EntryFormat, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Entries and key range of one chunk's un-rotated keys and values (T, G, D), checked."""
    entries, key_range, largest = form.encode_chunks(keys, values, [len(keys)])
    form.check(float(largest))
    return entries, key_range


def random_chunk(
    seed: int,
    n_tokens: int,
    fingerprint: Fingerprint = TINY,
    *,
    key: str | None = None,
    text: str | None = None,
) -> ChunkCache:
    """A chunk cache with the shapes that ``fingerprint`` asks for.

    Its content is random: entries of normal keys and values, and block_means that are not those of
    its keys. Without ``key`` it gets one that follows from the seed and belongs to no store's
    secret.
    """
    made_by = fingerprint
    blocks = made_by.scheme.of(n_tokens)
    dtype, middle = dtype_of(made_by), blocks.middle_blocks
    n_layers, n_groups, dim = made_by.n_layers, made_by.n_kv_heads, made_by.head_dim
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(of)

    def integer(low: int, high: int, *shape: int, of: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=of)

    def middle_block() -> Tensor:
        if not middle:
            return torch.full((n_layers,), -1, dtype=torch.int32)
        return integer(middle.start, middle.stop, n_layers, of=torch.int32)

    outliers = integer(0, 2, n_layers, n_tokens, of=torch.uint8).bool()
    is_anchor = torch.from_numpy(blocks.is_anchor.repeat(blocks.lengths))
    outliers[:, is_anchor] = False
    token_ids = integer(0, 32_000, n_tokens, of=torch.int32)
    n_middle = len(blocks.middle_blocks)
    form = entry_format_of(made_by)
    keys, values = (normal(n_layers, n_tokens, n_groups, dim) for _ in range(2))
    entries, ranges = map(
        torch.stack,
        zip(*(encoded(form, *each) for each in zip(keys, values, strict=True)), strict=True),
    )
    text = text if text is not None else f"Chunk {seed}, {n_tokens} tokens: é ∑.\nSecond line."
    ids = tuple(token_ids.tolist())
    return cache_arrays.cache_of(
        ChunkRef(key=key or f"{seed:032x}", text=text, token_ids=ids),
        made_by,
        entries=entries,
        key_range=ranges,
        local_query=normal(n_layers, made_by.n_heads, dim),
        statistics=ChunkStatistics(
            block_max=middle_block(),
            block_min=middle_block(),
            outliers=outliers,
            stable=integer(0, 2, n_layers, of=torch.uint8).bool(),
        ),
        block_means=BlockMeans(
            codes=integer(-127, 128, n_layers, n_middle, n_groups, dim, of=torch.int8),
            scale=normal(n_layers, n_middle, n_groups, of=torch.float16).abs(),
        ),
    )


def cache_of(engine: Engine, text: str) -> ChunkCache:
    """The cache of ``text``, as the engine's store hands it out."""
    ids = engine.model.tokenize(normalise(text), special=False)
    with engine.store.open(engine.key_of(text), engine.fingerprint, ids) as stored:
        return stored.chunk()


def decoded(chunk: ChunkCache) -> tuple[Tensor, Tensor]:
    """(L, T, G, D) each: the un-rotated keys and the values that a chunk's entries stand for."""
    form = entry_format_of(chunk.fingerprint)
    layers = list(zip(torch.from_numpy(chunk.entries), key_range(chunk), strict=True))
    group = groups(chunk.n_tokens, torch.device("cpu"))
    keys = torch.stack([form.keys(entries, ranges, group) for entries, ranges in layers])
    return keys, torch.stack([form.values(entries) for entries, _ in layers])


def key_steps(chunk: ChunkCache) -> Tensor:
    """(L, T, G, D): how far apart the transformed keys are that a token may have."""
    return key_range(chunk)[:, groups(chunk.n_tokens, torch.device("cpu")), 0].float()


def transformed(channels: Tensor) -> Tensor:
    """The Hadamard transform (..., D), each run of 2^k channels that divides a half, by its sums.

    Of channels in double precision: entry (i, j) of the matrix is -1 to the number of common bits.
    """
    dim = channels.shape[-1]
    size = next(
        s for s in (64, 32, 16, 8, 4, 2, 1) if s == 1 or (dim % 2 == 0 and dim // 2 % s == 0)
    )
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix = torch.tensor(signs, dtype=torch.float64) / size**0.5
    runs = [run @ matrix for run in channels.double().split(size, dim=-1)]
    return torch.cat(runs, dim=-1)

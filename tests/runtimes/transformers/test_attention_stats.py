"""Ingest-time analysis, on attention whose answer is known.

`test_prefill.py` holds it against the attention that transformers hands out.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    MIN_CHUNKS,
    MIN_LATER,
    LayerStatistics,
    chunk_statistics,
    decode_means,
    layer_statistics,
    mean_of_blocks,
    quantise_means,
    stable_layers,
)
from samkv_integrations.store.chunk import BlockScheme
from tests.support.tensors import normal

NAN, INF = math.nan, math.inf


def statistics_of(query: Tensor, key: Tensor, **options: Any) -> LayerStatistics:
    """Of a single chunk: query (H, T, D), key (G, P + T, D)."""
    n_later = torch.arange(query.shape[1]).flip(0)[None]
    return layer_statistics(query[None], key[None], 1.0, n_later=n_later, **options)


@pytest.mark.parametrize("tile", [7, 64])
def test_exact_power_laws_recover_their_exponent(tile: int) -> None:
    """One-hot keys let the query dictate the attention; the prefix token takes what is left."""
    n_tokens = 300
    alphas = torch.linspace(-0.3, 2.5, n_tokens, dtype=torch.float64)
    x = (torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)).double()
    strength = 2e-4 * (1 + torch.arange(n_tokens) % 5)
    attention = torch.where(x > 0, strength * x.clamp(min=1) ** -alphas, 0)
    rest = 1 - attention.sum(1, keepdim=True)
    assert rest.min() > 0
    query = torch.cat((rest, attention), 1).log().clamp(min=-1e4)[None]
    key = torch.eye(n_tokens + 1)[None]
    result = statistics_of(query.float(), key, n_prefix=1, tile=tile)
    fitted = result.alpha[0, : n_tokens - MIN_LATER]
    torch.testing.assert_close(fitted, alphas[: n_tokens - MIN_LATER].float(), atol=1e-3, rtol=0)


def test_attention_that_underflows_counts_as_the_floor() -> None:
    """A column of exact zeros has a flat power law, not a nan or an infinite one."""
    query = torch.zeros(1, 30, 1) + 1
    key = torch.zeros(1, 30, 1)
    key[0, 5] = -500  # e^-500 is zero in float32
    result = statistics_of(query, key)
    assert result.sustained[0, 5] == 0
    assert result.alpha[0, 5].abs() < 1e-5
    assert result.alpha[0, :22].isfinite().all()


@pytest.mark.parametrize("tile", [64, 300])
@pytest.mark.parametrize("n_prefix", [0, 3])
def test_chunks_of_a_batch_count_as_each_alone(n_prefix: int, tile: int) -> None:
    """The chunks end in the first, the second and the third 256 queries."""
    lengths, longest = (600, 290, 100), 600
    query, key = normal(0, 3, 4, longest, 8), normal(1, 3, 2, n_prefix + longest, 8)
    value, out = normal(2, *key.shape), torch.empty_like(query)
    n_later = torch.tensor(lengths)[:, None] - 1 - torch.arange(longest)
    found = layer_statistics(
        query, key, 1.0, n_later=n_later, n_prefix=n_prefix, tile=tile, value=value, out=out
    )
    for i, length in enumerate(lengths):
        some, seen = query[i, :, :length], key[i, :, : n_prefix + length]
        alone = statistics_of(some, seen, n_prefix=n_prefix)
        torch.testing.assert_close(found.alpha[i, :length], alone.alpha[0], equal_nan=True)
        torch.testing.assert_close(found.sustained[i, :length], alone.sustained[0], equal_nan=True)
        expected = torch.nn.functional.scaled_dot_product_attention(
            some, seen, value[i, :, : n_prefix + length], scale=1.0, enable_gqa=True,
            attn_mask=torch.ones(length, n_prefix + length).tril(n_prefix).bool(),
        )  # fmt: skip
        torch.testing.assert_close(out[i, :, :length], expected)


def one_layer(alpha: list[float], sustained: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor([alpha]), torch.tensor([sustained])


def test_leading_and_trailing_block_of_a_chunk_worked_out_by_hand() -> None:
    """Anchors do not compete; a block is as important as its best token; ties go to the first."""
    blocks = BlockScheme(size=2, n_init=1, n_local=1).of(10)
    alpha = [0.0, 0.0, 0.9, 0.5, 0.5, 0.7, NAN, NAN, 0.1, NAN]
    sustained = [0.0, 0.0, 0.3, 0.1, 0.2, 0.1, 0.0, 0.2, 0.0, NAN]
    result = chunk_statistics(*one_layer(alpha, sustained), blocks)
    assert result.block_max.tolist() == [1]  # 0.5 in blocks 1 and 2
    assert result.block_min.tolist() == [2]  # 0.2 in blocks 2 and 3
    assert not result.stable.any()


@pytest.mark.parametrize(("n_blocks", "expected"), [(10, False), (11, True)])
def test_three_sigma_needs_eleven_blocks(n_blocks: int, expected: bool) -> None:
    """One block against equal others is the furthest that a value can be from the rest."""
    alpha = [0.7] * n_blocks
    alpha[4] = -12.3
    blocks = BlockScheme(size=1).of(n_blocks)
    result = chunk_statistics(*one_layer(alpha, [0.1] * n_blocks), blocks)
    assert result.stable.tolist() == [expected]
    assert result.outliers.any().item() is expected


def test_a_token_read_by_all_later_ones_is_found_from_queries_and_keys() -> None:
    """From tensors to verdict: a planted key leads the chunk, a planted repellent block trails."""
    n_tokens, planted = 160, 70
    blocks = BlockScheme(size=8).of(n_tokens)
    layers = []
    for seed in range(3):
        query, key = normal(seed, 4, n_tokens, 8) * 0.1, normal(seed + 9, 2, n_tokens, 8) * 0.1
        # Attention falls like e^(-x / 20) with distance, but for the planted token, whose logits
        # grow along with the sum of all others.
        query[..., 0], query[..., 1] = 1, torch.arange(n_tokens) / 20
        key[..., 0], key[..., 1] = torch.arange(n_tokens) / 20, 0
        key[:, planted, 0], key[:, planted, 1] = 0, 1
        key[:, 96:104, 0] = -5
        layers.append(statistics_of(query, key, tile=50))
    alpha, sustained = (
        torch.cat([getattr(layer, name) for layer in layers]) for name in ("alpha", "sustained")
    )
    result = chunk_statistics(alpha, sustained, blocks)
    assert result.block_max.tolist() == [planted // 8] * 3
    assert result.block_min.tolist() == [96 // 8] * 3


@pytest.mark.parametrize(
    ("n_layers", "expected"), [(1, (0,)), (7, (6,)), (16, (14, 15)), (36, (32, 33, 34, 35))]
)
def test_the_last_eighth_until_enough_chunks_have_voted(
    n_layers: int, expected: tuple[int, ...]
) -> None:
    votes = torch.zeros(MIN_CHUNKS - 1, n_layers, dtype=torch.bool)
    votes[:, n_layers * 3 // 4] = True
    assert stable_layers(n_layers, None) == expected
    assert stable_layers(n_layers, votes) == expected


@given(seed=st.integers(0, 10_000), n_layers=st.integers(1, 40), share=st.floats(0, 1))
def test_stable_layers_follow_their_rule(seed: int, n_layers: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    votes = torch.rand(MIN_CHUNKS, n_layers, generator=generator) < share
    shares = [statistics.fmean(map(int, column)) for column in votes.T.tolist()]
    chosen = [
        n
        for n in range(n_layers - max(1, n_layers // 4), n_layers)
        if shares[n] > 0 and shares[n] >= statistics.fmean(shares) - 1e-12
    ]
    expected = chosen or range(n_layers - max(1, n_layers // 8), n_layers)
    assert stable_layers(n_layers, votes) == tuple(expected)


@pytest.mark.parametrize(
    ("n_tokens", "size", "dtype", "n_local"),
    [(2, 1, torch.float32, 0), (9, 4, torch.bfloat16, 2), (40, 4, torch.float32, 2),
     (40, 16, torch.bfloat16, 0)],
)  # fmt: skip
def test_block_means_are_close_to_the_means(
    n_tokens: int, size: int, dtype: torch.dtype, n_local: int
) -> None:
    keys = (normal(n_tokens, 2, n_tokens, 3, 8) + 2).to(dtype)
    blocks = BlockScheme(size=size, n_local=n_local).of(n_tokens)
    middle = list(range(1, blocks.n_blocks - n_local)) if blocks.n_blocks > 1 + n_local else []
    block_means = quantise_means(mean_of_blocks(keys, torch.from_numpy(blocks.lengths))[:, middle])
    assert block_means.codes.shape == (2, len(middle), 3, 8)
    assert block_means.scale.shape == (2, len(middle), 3)
    assert (block_means.codes.dtype, block_means.scale.dtype) == (torch.int8, torch.float16)
    means = decode_means(block_means)
    for layer in range(2):
        for place, block in enumerate(middle):
            first, stop = blocks.span(block)
            for head in range(3):
                rows = keys[layer, first:stop, head].double().tolist()
                exact = [statistics.fmean(channel) for channel in zip(*rows, strict=True)]
                scale = float(block_means.scale[layer, place, head])
                assert scale <= 1.001 * max(map(abs, exact)) / 127 + 2**-23
                for got, want in zip(means[layer, place, head].tolist(), exact, strict=True):
                    assert abs(got - want) <= scale / 2 + 1e-5

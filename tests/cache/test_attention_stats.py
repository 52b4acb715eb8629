"""Ingest-time analysis against loops over plain Python numbers that know nothing of tiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.cache.attention_stats import (
    ATTENTION_FLOOR,
    MIN_CHUNKS,
    MIN_LATER,
    MIN_PAUTA,
    LayerStatistics,
    chunk_statistics,
    decode_means,
    layer_statistics,
    quantise_means,
    stable_layers,
)
from samkv_integrations.cache.chunk import BlockScheme, ChunkBlocks

NAN, INF = math.nan, math.inf


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(actual: Tensor, expected: Sequence[float]) -> None:
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-4, atol=1e-5, equal_nan=True
    )


# --- layer_statistics --------------------------------------------------------------------------


def oracle_columns(query: Tensor, key: Tensor, scaling: float, n_prefix: int) -> list[list[float]]:
    """For each token of the chunk, the head-mean attention from 1, 2, ... tokens later."""
    n_heads, n_tokens, _ = query.shape
    group = n_heads // key.shape[0]
    q, k = query.tolist(), key.tolist()
    columns: list[list[float]] = [[] for _ in range(n_tokens)]
    for row in range(n_tokens):
        mean = [0.0] * row
        for h in range(n_heads):
            logits = [
                scaling * sum(a * b for a, b in zip(q[h][row], k[h // group][j], strict=True))
                for j in range(n_prefix + row + 1)
            ]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for t in range(row):
                mean[t] += weights[n_prefix + t] / sum(weights) / n_heads
        for t in range(row):
            columns[t].append(mean[t])
    return columns


def oracle_alpha(column: list[float]) -> float:
    if len(column) < MIN_LATER:
        return NAN
    u = [math.log(x) for x in range(1, len(column) + 1)]
    v = [math.log(max(a, ATTENTION_FLOOR)) for a in column]
    return -statistics.linear_regression(u, v).slope


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("n_prefix", [0, 1, 3])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (6, 1), (2, 2)])
def test_layer_statistics_equal_the_loops_at_any_tile(
    n_tokens: int, n_prefix: int, n_heads: int, n_kv_heads: int
) -> None:
    for seed in range(3):
        query = 3 * normal(seed, n_heads, n_tokens, 4)
        key = normal(seed + 50, n_kv_heads, n_prefix + n_tokens, 4)
        columns = oracle_columns(query, key, 0.7, n_prefix)
        alpha = [oracle_alpha(column) for column in columns]
        sustained = [statistics.fmean(column) if column else NAN for column in columns]
        for tile in (1, 3, 16, 256):
            result = layer_statistics(query, key, 0.7, n_prefix=n_prefix, tile=tile)
            assert result.alpha.dtype == result.sustained.dtype == torch.float32
            assert_same(result.alpha, alpha)
            assert_same(result.sustained, sustained)


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
    result = layer_statistics(query.float(), key, 1.0, n_prefix=1, tile=tile)
    fitted = result.alpha[: n_tokens - MIN_LATER]
    torch.testing.assert_close(fitted, alphas[: n_tokens - MIN_LATER].float(), atol=1e-3, rtol=0)


def test_attention_that_underflows_counts_as_the_floor() -> None:
    """A column of exact zeros has a flat power law, not a nan or an infinite one."""
    query = torch.zeros(1, 30, 1) + 1
    key = torch.zeros(1, 30, 1)
    key[0, 5] = -500  # e^-500 is zero in float32
    result = layer_statistics(query, key, 1.0)
    assert result.sustained[5] == 0
    assert result.alpha[5].abs() < 1e-5
    assert result.alpha[:22].isfinite().all()


def test_half_precision_inputs_are_computed_in_float32() -> None:
    query, key = normal(5, 4, 33, 8).bfloat16(), normal(6, 2, 33, 8).bfloat16()
    half = layer_statistics(query, key, 0.3, tile=10)
    full = layer_statistics(query.float(), key.float(), 0.3, tile=10)
    assert torch.equal(half.alpha[:20], full.alpha[:20])


# --- chunk_statistics --------------------------------------------------------------------------


def oracle_pauta(values: list[float], value: float) -> bool:
    real = [v for v in values if not math.isnan(v)]
    if len(real) < MIN_PAUTA:
        return False
    return value < statistics.fmean(real) - 3 * statistics.pstdev(real)


def oracle_chunk(
    layers: list[LayerStatistics], blocks: ChunkBlocks
) -> tuple[list[int], list[int], list[list[bool]], list[bool]]:
    spans = [blocks.span(n) for n in range(blocks.n_blocks)]
    middle = list(blocks.middle_blocks)
    block_max, block_min, outliers, importances = [], [], [], []
    for layer in layers:
        alpha, sustained = layer.alpha.tolist(), layer.sustained.tolist()
        importance, prominence = [], []
        for first, stop in spans:
            importance.append(min((a for a in alpha[first:stop] if not math.isnan(a)), default=INF))
            lasting = [a for a in sustained[first:stop] if not math.isnan(a)]
            prominence.append(max(lasting) if lasting else INF)
        importances.append(importance)
        block_max.append(min(middle, key=lambda n: importance[n], default=-1))  # noqa: B023
        block_min.append(min(middle, key=lambda n: prominence[n], default=-1))  # noqa: B023
        outliers.append(
            [
                t // blocks.scheme.size in middle and oracle_pauta(alpha, alpha[t])
                for t in range(blocks.n_tokens)
            ]
        )
    ranked = [n for n in range(blocks.n_blocks) if all(row[n] < INF for row in importances)]
    rank_sums = {
        n: sum(sorted(ranked, key=row.__getitem__).index(n) for row in importances) for n in ranked
    }
    stable = [False] * len(layers)
    if ranked:
        leading = min(ranked, key=rank_sums.__getitem__)
        stable = [oracle_pauta([row[n] for n in ranked], row[leading]) for row in importances]
    return block_max, block_min, outliers, stable


def random_layers(seed: int, n_layers: int, n_tokens: int) -> list[LayerStatistics]:
    """Coarse values, so that ties are common, with a few tokens far below or without alpha."""
    generator = torch.Generator().manual_seed(seed)
    alpha = (torch.rand(n_layers, n_tokens, generator=generator) * 6).round() / 6 + 0.5
    leading = int(torch.randint(n_tokens, (), generator=generator))
    alpha[:, leading] -= 4 * torch.rand(n_layers, generator=generator)
    far = torch.rand(n_layers, n_tokens, generator=generator) < 0.01
    alpha = alpha - 3 * far
    alpha[torch.rand(n_layers, n_tokens, generator=generator) < 0.01] = NAN
    alpha[:, max(0, n_tokens - MIN_LATER) :] = NAN
    sustained = (torch.rand(n_layers, n_tokens, generator=generator) * 20).round() / 400
    sustained[:, -1] = NAN
    return [LayerStatistics(alpha=a, sustained=s) for a, s in zip(alpha, sustained, strict=True)]


SCHEMES = [
    BlockScheme(size=4),
    BlockScheme(size=1, n_init=0, n_local=0),
    BlockScheme(size=8, n_init=2, n_local=0),
    BlockScheme(size=5, n_init=0, n_local=1),
]


@pytest.mark.parametrize("n_tokens", [1, 2, 9, 16, 40, 121, 200])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_chunk_statistics_equal_the_loops(n_tokens: int, scheme: BlockScheme) -> None:
    for seed in range(2):
        layers, blocks = random_layers(seed, 5, n_tokens), scheme.of(n_tokens)
        result = chunk_statistics(layers, blocks)
        block_max, block_min, outliers, stable = oracle_chunk(layers, blocks)
        assert result.block_max.tolist() == block_max
        assert result.block_min.tolist() == block_min
        assert result.outliers.tolist() == outliers
        assert result.stable.tolist() == stable
        assert result.block_max.dtype == result.block_min.dtype == torch.int32
        assert result.outliers.dtype == result.stable.dtype == torch.bool


def test_the_random_layers_hold_what_the_comparison_is_about() -> None:
    """Without outliers, stable and unstable layers, and ties the test above would show little."""
    blocks = BlockScheme(size=4).of(121)
    results = [chunk_statistics(random_layers(seed, 5, 121), blocks) for seed in range(6)]
    assert any(r.outliers.any() for r in results)
    stable = torch.cat([r.stable for r in results])
    assert stable.any() and not stable.all()


def one_layer(alpha: list[float], sustained: list[float]) -> list[LayerStatistics]:
    return [LayerStatistics(alpha=torch.tensor(alpha), sustained=torch.tensor(sustained))]


def test_leading_and_trailing_block_of_a_chunk_worked_out_by_hand() -> None:
    """Anchors do not compete; a block is as important as its best token; ties go to the first."""
    blocks = BlockScheme(size=2, n_init=1, n_local=1).of(10)
    alpha = [0.0, 0.0, 0.9, 0.5, 0.5, 0.7, NAN, NAN, 0.1, NAN]
    sustained = [0.0, 0.0, 0.3, 0.1, 0.2, 0.1, 0.0, 0.2, 0.0, NAN]
    result = chunk_statistics(one_layer(alpha, sustained), blocks)
    assert result.block_max.tolist() == [1]  # 0.5 in blocks 1 and 2
    assert result.block_min.tolist() == [2]  # 0.2 in blocks 2 and 3
    assert not result.stable.any()


@pytest.mark.parametrize(("n_blocks", "expected"), [(10, False), (11, True)])
def test_three_sigma_needs_eleven_blocks(n_blocks: int, expected: bool) -> None:
    """One block against equal others is the furthest that a value can be from the rest."""
    alpha = [0.7] * n_blocks
    alpha[4] = -12.3
    blocks = BlockScheme(size=1).of(n_blocks)
    result = chunk_statistics(one_layer(alpha, [0.1] * n_blocks), blocks)
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
        layers.append(layer_statistics(query, key, 1.0, tile=50))
    result = chunk_statistics(layers, blocks)
    assert result.block_max.tolist() == [planted // 8] * 3
    assert result.block_min.tolist() == [96 // 8] * 3


# --- stable layers -----------------------------------------------------------------------------


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


# --- block_means ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_local", [0, 2])
def test_block_means_are_close_to_the_means(
    n_tokens: int, size: int, dtype: torch.dtype, n_local: int
) -> None:
    keys = (normal(n_tokens, 2, n_tokens, 3, 8) + 2).to(dtype)
    blocks = BlockScheme(size=size, n_local=n_local).of(n_tokens)
    block_means = quantise_means(keys, blocks)
    middle = list(range(1, blocks.n_blocks - n_local)) if blocks.n_blocks > 1 + n_local else []
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

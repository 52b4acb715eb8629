"""Rounding with feedback against number-by-number loops, and against what it must keep small."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.rounding import DAMPING, round_with_feedback

TOP = 15


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(seed: int, n_heads: int, dim: int, n_queries: int = 200) -> Tensor:
    """(G, D, D) of queries that look much more along some directions than along others."""
    stretched = normal(seed, n_heads, n_queries, dim) * torch.logspace(0, -1.5, dim)
    queries = stretched @ torch.linalg.qr(normal(seed + 1, n_heads, dim, dim))[0]
    return queries.mT @ queries


def damped(hessian: Tensor) -> Tensor:
    """Of one head, in double precision."""
    wide, dim = hessian.double(), len(hessian)
    mean = sum(float(wide[i, i]) for i in range(dim)) / dim
    return wide + (DAMPING * mean if mean > 0 else 1.0) * torch.eye(dim, dtype=torch.float64)


def by_loops(
    numbers: list[float], scale: list[float], offset: list[float], hessian: Tensor
) -> list[int]:
    """Codes of one head: each channel minimises e' H e over what is still free, by a linear solve.

    With errors e of the channels so far, later ones could still be any real number: those that do
    best follow from H. The channel is rounded from where its own best number is.
    """
    dim = len(numbers)
    errors: list[float] = []
    codes = []
    for channel in range(dim):
        free = hessian[channel:, channel:]
        bound = hessian[channel:, :channel] @ torch.tensor(errors, dtype=torch.float64)
        best = -torch.linalg.solve(free, bound)[0] if errors else torch.tensor(0.0)
        wanted = numbers[channel] + float(best)
        code = min(TOP, max(0, round((wanted - offset[channel]) / scale[channel])))
        codes.append(code)
        errors.append(code * scale[channel] + offset[channel] - numbers[channel])
    return codes


def cost(codes: Tensor, numbers: Tensor, scale: Tensor, offset: Tensor, hessian: Tensor) -> Tensor:
    """(T, G) e' H e."""
    error = (codes * scale + offset - numbers).double()
    return torch.einsum("tgd,gde,tge->tg", error, hessian.double(), error)


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 40])
def test_each_channel_makes_good_what_those_before_it_lost(dim: int) -> None:
    """The best number of a channel, given the errors so far, by a solver: another way to the same.

    A code differs where rounding to float32 decides a tie, which is not one in a hundred.
    """
    n_tokens, n_heads = 7, 2
    numbers, hessian = normal(dim, n_tokens, n_heads, dim), hessian_of(dim, n_heads, dim)
    scale = 0.2 + 0.2 * torch.rand(numbers.shape, generator=torch.Generator().manual_seed(1))
    offset = -3 + 0.3 * normal(3, *numbers.shape)
    found = round_with_feedback(numbers, scale, offset, hessian, TOP)
    same = []
    for token in range(n_tokens):
        for head in range(n_heads):
            sides = (side[token, head].tolist() for side in (numbers, scale, offset))
            expected = by_loops(*sides, damped(hessian[head]))
            same.append(found[token, head].tolist() == expected)
    assert sum(same) >= math.ceil(0.9 * len(same))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), dim=st.integers(1, 40), heads=st.integers(1, 3),
    step=st.floats(0.1, 1.0),
)  # fmt: skip
def test_what_queries_see_of_an_error_is_bounded(
    seed: int, dim: int, heads: int, step: float
) -> None:
    """By the sum over channels of (half a step)^2 times the weight that is left to a channel.

    Derived: with R R' the damped H, R upper triangular, e' H e is the sum over channels of R_jj^2
    times the squared distance from the number that the channel was rounded from. Where no code is
    at the end of its range, that is half a step at most.
    """
    numbers, hessian = normal(seed, 5, heads, dim), hessian_of(seed, heads, dim)
    scale = torch.full_like(numbers, step)
    offset = torch.full_like(numbers, -127 * step)
    codes = round_with_feedback(numbers, scale, offset, hessian, 255)
    assume(bool(((codes > 0) & (codes < 255)).all()))
    for head in range(heads):
        wide = damped(hessian[head])
        flipped = torch.linalg.cholesky(wide.flip(0, 1)).flip(0, 1)
        bound = float(flipped.diagonal().square().sum()) * (step / 2) ** 2
        found = cost(*(x[:, head : head + 1] for x in (codes, numbers, scale, offset)), wide[None])
        # offsets of 127 steps in float32: the numbers are off by 1e-5 of a step
        assert bool((found <= bound * 1.01 + 1e-9).all())


@pytest.mark.parametrize("seed", range(4))
def test_queries_see_a_third_of_what_the_nearest_codes_lose(seed: int) -> None:
    numbers, hessian = normal(seed, 300, 2, 32), hessian_of(seed, 2, 32)
    scale, offset = torch.full_like(numbers, 0.35), torch.full_like(numbers, -2.6)
    given = numbers, scale, offset, hessian
    nearest = ((numbers - offset) / scale).round().clamp(0, TOP)
    found = round_with_feedback(*given, TOP)
    assert bool(((found >= 0) & (found <= TOP)).all())
    assert cost(found, *given).sum() < 0.5 * cost(nearest, *given).sum()


@pytest.mark.parametrize("weight", [0.0, 1.0, 7.0])
def test_directions_that_weigh_the_same_are_rounded_to_the_nearest(weight: float) -> None:
    """The identity, and no queries at all."""
    numbers = normal(0, 20, 2, 24)
    scale, offset = torch.full_like(numbers, 0.3), torch.full_like(numbers, -2.2)
    hessian = weight * torch.eye(24).expand(2, -1, -1)
    found = round_with_feedback(numbers, scale, offset, hessian, TOP)
    assert torch.equal(found, ((numbers - offset) / scale).round().clamp(0, TOP))


def test_one_query_alone_sees_little_of_the_error() -> None:
    """It is one direction, and an error may lie in all the others; the last channel has none left,
    and what other queries might see weighs as well."""
    query = normal(5, 1, 1, 32)
    numbers = normal(6, 50, 1, 32)
    scale, offset = torch.full_like(numbers, 0.35), torch.full_like(numbers, -2.6)
    given = numbers, scale, offset, query.mT @ query
    nearest = ((numbers - offset) / scale).round().clamp(0, TOP)
    found = round_with_feedback(*given, TOP)
    assert cost(found, *given).sum() < 0.2 * cost(nearest, *given).sum()


def test_the_numbers_given_stay_as_they_are() -> None:
    numbers = normal(0, 5, 1, 20)
    kept, scale, offset = numbers.clone(), torch.ones_like(numbers), torch.zeros_like(numbers)
    round_with_feedback(numbers, scale, offset, hessian_of(1, 1, 20), TOP)
    assert torch.equal(numbers, kept)
    assert scale.eq(1).all() and offset.eq(0).all()

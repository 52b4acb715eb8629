"""Entries in the store: what comes back, for which tokens, at which positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from samkv_integrations.errors import InvalidChunk, InvalidOption
from samkv_integrations.runtimes.llama_cpp.entries import EntryCodec
from samkv_integrations.runtimes.llama_cpp.library.binding import NEOX, NORM
from samkv_integrations.runtimes.llama_cpp.library.positions import CannotRotate, Rotation
from samkv_integrations.runtimes.llama_cpp.library.state import CannotSplit, StateLayout

N_LAYERS = 3


def rotation(kind: int, dim: int) -> Rotation:
    return Rotation(
        kind=kind, n_rotated=dim, frequencies=100.0 ** (-np.arange(0, dim, 2) / dim)
    )  # fmt: skip


def rows(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(L, T, G, D) -> (L, T, bytes)."""
    return numbers.astype(np.float16).reshape(*numbers.shape[:2], -1).view(np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([16, 8, 4]),
    kind=st.sampled_from([NORM, NEOX]),
    n_heads=st.sampled_from([1, 2, 3]),
    dims=st.sampled_from([(16, 16), (64, 64), (24, 16), (48, 32)]),
    n_tokens=st.integers(1, 150),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_entries_come_back_at_other_positions(
    bits: int, kind: int, n_heads: int, dims: tuple[int, int], n_tokens: int, seed: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    draw = np.random.default_rng(seed)
    k_dim, v_dim = dims
    keys, values = (
        draw.normal(size=(N_LAYERS, n_tokens, n_heads, dim)).astype(np.float32) for dim in dims
    )
    codec = EntryCodec(bits=bits, n_heads=n_heads, k_dim=k_dim, v_dim=v_dim)
    rotated, cached_at = rotation(kind, k_dim), np.arange(7, 7 + n_tokens)
    entries, key_range = codec.encode(rows(keys), rows(values), rotated, cached_at)
    assert entries.shape == (N_LAYERS, n_tokens, codec.n_bytes)
    assert key_range.shape == (N_LAYERS, *codec.range_shape(n_tokens))

    chosen = np.array(
        sorted(data.draw(st.sets(st.integers(0, n_tokens - 1), min_size=1))), np.int64
    )
    positions = chosen + data.draw(st.integers(0, 5000))
    expected = keys[:, chosen].copy()
    rotated.rotate(expected, positions - cached_at[chosen])
    of_keys = np.empty((N_LAYERS, len(chosen), 2 * n_heads * k_dim), np.uint8)
    of_values = np.empty((N_LAYERS, len(chosen), 2 * n_heads * v_dim), np.uint8)
    codec.decode(
        entries, key_range, rotated, chosen, cached_at[chosen], positions, of_keys, of_values
    )
    allowed = {16: 0.01, 8: 0.06, 4: 0.8}[bits]  # of normal numbers, some six wide
    for found, wanted in ((of_keys, expected), (of_values, values[:, chosen])):
        assert np.abs(found.view(np.float16).reshape(wanted.shape) - wanted).max() < allowed


def test_where_it_was_cached_every_bit_comes_back() -> None:
    draw = np.random.default_rng(0)
    keys, values = (rows(draw.normal(size=(2, 5, 2, 16))) for _ in range(2))
    codec, at = EntryCodec(bits=16, n_heads=2, k_dim=16, v_dim=16), np.arange(5)
    entries, none = codec.encode(keys, values, rotation(NEOX, 16), at)
    of_keys, of_values = np.empty_like(keys), np.empty_like(values)
    codec.decode(entries, none, rotation(NEOX, 16), at, at, at, of_keys, of_values)
    assert np.array_equal(of_keys, keys) and np.array_equal(of_values, values)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_is_not_finite_is_refused(bits: int, number: float) -> None:
    good = rows(np.zeros((1, 2, 1, 16), np.float32))
    bad = good.copy()
    bad.view(np.float16)[0, 1, 3] = number
    codec = EntryCodec(bits=bits, n_heads=1, k_dim=16, v_dim=16)
    for keys, values in ((bad, good), (good, bad)):
        with np.errstate(invalid="ignore"), pytest.raises(InvalidChunk, match="not finite"):
            codec.encode(keys, values, rotation(NEOX, 16), np.arange(2))


def test_other_bits_are_refused() -> None:
    with pytest.raises(InvalidOption, match="store_bits=5"):
        EntryCodec(bits=5, n_heads=1, k_dim=16, v_dim=16)


@pytest.mark.parametrize("kind", [NORM, NEOX])
@pytest.mark.parametrize("n_rotated", [16, 8])
def test_frequencies_are_measured(kind: int, n_rotated: int) -> None:
    known = rotation(kind, n_rotated)
    positions = np.array([0, *(2**k for k in range(13))])
    at_zero = np.random.default_rng(1).normal(size=(4, 1, 2, 16)).astype(np.float32)
    keys = np.repeat(at_zero, len(positions), axis=1)
    known.rotate(keys, positions)
    keys = keys.astype(np.float16).astype(np.float32)
    found = Rotation.measured(kind, n_rotated, keys, positions)
    assert np.allclose(found.frequencies, known.frequencies, atol=1e-6)
    with pytest.raises(CannotRotate):
        Rotation.measured(NEOX if kind == NORM else NORM, n_rotated, keys, positions)
    keys[2] *= 1.1 ** np.arange(len(positions))[:, None, None]
    with pytest.raises(CannotRotate):
        Rotation.measured(kind, n_rotated, keys, positions)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 4))
def test_bytes_that_are_no_state_are_refused(data: bytes, n_cells: int) -> None:
    with pytest.raises(CannotSplit):
        StateLayout.of(np.frombuffer(data, np.uint8), n_cells)

"""Entries of few bits against their definition in plain Python, and how far they may be off."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.errors import InvalidChunk, InvalidOption
from samkv_integrations.runtimes.transformers.entries.quantise import (
    Entries,
    EntryFormat,
    groups,
    rotate,
)
from tests.support.chunks import encoded, transformed
from tests.support.tensors import normal

FORM = EntryFormat(bits=4, n_kv_heads=2, head_dim=8, dtype=torch.float32)
QUANTISED = (4, 8)


def of(bits: int, dtype: torch.dtype = torch.float32, n_kv_heads: int = 2, head_dim: int = 8):
    return replace(FORM, bits=bits, dtype=dtype, n_kv_heads=n_kv_heads, head_dim=head_dim)


def there_and_back(form: EntryFormat, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    entries, key_range = encoded(form, keys, values)
    assert (entries.dtype, entries.shape) == (torch.uint8, (len(keys), form.n_bytes))
    group = groups(len(keys), keys.device)
    return form.keys(entries, key_range, group), form.values(entries)


def value_scales(form: EntryFormat, entries: Tensor) -> Tensor:
    """(T, G) scales of the values, the first of the float16 numbers at the entry's end."""
    n_bytes = 2 * form.n_kv_heads
    start = form.n_bytes - 2 * n_bytes
    return entries[:, start : start + n_bytes].contiguous().view(torch.float16).float()


def test_an_entry_written_by_hand() -> None:
    """Eight channels of one head: keys whose transform is told by its codes, and values too."""
    form = of(4, n_kv_heads=1, head_dim=8)
    first = [0.0, 15.0, 3.0, 7.0, 1.0, 2.0, 4.0, 0.0]
    second = [15.0, 0.0, 18.0, -8.0, 16.0, 17.0, 19.0, 15.0]
    # its own inverse, and exact: half the sums and differences of four whole numbers
    keys = transformed(torch.tensor([[first], [second]])).float()
    assert keys[0, 0, :4].tolist() == [12.5, -9.5, 2.5, -5.5]
    values = torch.tensor([[[0.0, 1.0, 2.0, 15.0, 3.0, 4.0, 5.0, 6.0]], [[0.0] * 8]])
    entries, key_range = encoded(form, keys, values)
    # offsets: 3 (1 - 2^-11) rounded to even among steps of 2^-9; -8 (1 + 2^-11) among those of 2^-7
    offsets = [0.0, 0.0, 3 - 2**-9, -8.0, 1 - 2**-11, 2 - 2**-10, 4 - 2**-9, 0.0]
    assert key_range.tolist() == [[[[1.0] * 8], [offsets]]]
    found = [bytes(entry.tolist()) for entry in entries]
    one, tiny = struct.pack("<e", 1.0), struct.pack("<e", 2**-24)  # tiny: never a scale of 0
    codes = [0 + 16 * 0, 15 + 16 * 0, 0 + 16 * 0, 15 + 16 * 0]
    values_of_first = [0 + 16 * 3, 1 + 16 * 4, 2 + 16 * 5, 15 + 16 * 6]
    assert found[0] == bytes(codes + values_of_first) + one + struct.pack("<e", 0.0)
    codes = [15 + 16 * 15, 0 + 16 * 15, 15 + 16 * 15, 0 + 16 * 15]
    assert found[1] == bytes(codes + [0, 0, 0, 0]) + tiny + bytes(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bits_keep_every_bit(dtype: torch.dtype) -> None:
    form = of(16, dtype)
    keys, values = normal(1, 7, 2, 8).to(dtype) * 1000, normal(2, 7, 2, 8).to(dtype)
    back_keys, back_values = there_and_back(form, keys, values)
    assert back_keys.dtype == back_values.dtype == dtype
    assert torch.equal(back_keys, keys) and torch.equal(back_values, values)
    entries, _ = encoded(form, keys, values)
    for t in range(7):
        raw = bytes(keys[t].reshape(-1).view(torch.uint8).tolist())
        raw += bytes(values[t].reshape(-1).view(torch.uint8).tolist())
        assert bytes(entries[t].tolist()) == raw


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from(QUANTISED),
    n_tokens=st.integers(1, 6),
    head_dim=st.sampled_from([2, 4, 12]),
    bias=st.sampled_from([0.0, 1e-6, 0.3, -40.0, 900.0, -30_000.0]),
    spread=st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_comes_back_is_within_half_a_step(
    seed: int,
    bits: int,
    n_tokens: int,
    head_dim: int,
    bias: float,
    spread: float,
    dtype: torch.dtype,
) -> None:
    """Of its channel of the transform for a key, of its token and head for a value; and no step is
    too wide."""
    form = of(bits, dtype, 3, head_dim)
    keys, values = (bias + spread * normal(seed, 2, n_tokens, 3, head_dim)).to(dtype)
    entries, key_range = encoded(form, keys, values)
    (key_range,) = key_range  # of the one group
    back_keys, back_values = there_and_back(form, keys, values)
    assert back_keys.dtype == back_values.dtype == torch.float32
    levels, keys, values = 2**bits - 1, transformed(keys), values.float()
    # of the arithmetic, a sum of up to 2 products a channel
    step, rounding = key_range[0].float(), 1e-6 * keys.abs().amax() + 2.0**-24
    assert ((transformed(back_keys) - keys).abs() <= step / 2 + rounding).all()
    low = keys.amin(0)
    span = keys.amax(0) - low + 2.0**-10 * low.abs() + 2 * rounding  # offsets are float16
    assert (step <= span / levels * 1.001 + 2.0**-22).all()

    step = value_scales(form, entries)[..., None]
    largest = values.abs().amax(-1, keepdim=True)
    rounding = (1e-6 + torch.finfo(dtype).eps / 2) * largest + 2.0**-25
    assert ((back_values.float() - values).abs() <= step / 2 + rounding).all()
    low = values.amin(-1, keepdim=True)
    span = values.amax(-1, keepdim=True) - low + 2.0**-10 * low.abs()  # offsets are float16
    assert (step <= span / levels * 1.001 + 2.0**-22).all()


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([4, 8, 16]),
    n_tokens=st.lists(st.sampled_from([1, 9, 64, 65, 130]), min_size=1, max_size=4),
)
def test_chunks_are_coded_together_as_they_are_alone(
    seed: int, bits: int, n_tokens: list[int]
) -> None:
    """With the groups of all of them counted on."""
    form = of(bits)
    chunks = [(normal(seed + i, n, 2, 8) + 10 * i, normal(seed - i, n, 2, 8))
              for i, n in enumerate(n_tokens)]  # fmt: skip
    keys, values = (torch.cat(side) for side in zip(*chunks, strict=True))
    alone, ranges = zip(*(encoded(form, *chunk) for chunk in chunks), strict=True)
    of_chunk = [groups(n, keys.device) for n in n_tokens]
    decoded = [form.keys(*parts) for parts in zip(alone, ranges, of_chunk, strict=True)]
    first = torch.tensor([0, *(len(own) for own in ranges)]).cumsum(0).tolist()
    group = torch.cat([start + own for start, own in zip(first, of_chunk, strict=False)])
    together, of_all, largest = form.encode_chunks(keys, values, n_tokens)
    assert torch.equal(together, torch.cat(alone)) and torch.equal(of_all, torch.cat(ranges))
    form.check(float(largest))
    assert torch.equal(form.keys(together, of_all, group), torch.cat(decoded))
    turns = [normal(seed + 5, len(keys), 2, 4), normal(seed + 6, len(keys), 2, 4)]
    cos, sin = (torch.cat((turn[:, 0], turn[:, 0]), dim=-1) for turn in turns)
    of_heads = [turn[:, :1].expand(-1, 2, -1).contiguous() for turn in turns]
    entries = Entries(
        form=form, codes=together, key_range=of_all, group=group, cos=of_heads[0], sin=of_heads[1]
    )
    rotated, _ = entries.keys_and_values()
    torch.testing.assert_close(rotated, rotate(torch.cat(decoded), cos, sin))
    assert torch.equal(form.values(together), torch.cat([form.values(own) for own in alone]))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_refused(bits: int, wrong: float, side: int) -> None:
    form, sides = of(bits), [normal(8, 5, 2, 8), normal(9, 5, 2, 8)]
    sides[side][3, 1, 5] = wrong
    with pytest.raises(InvalidChunk, match="not finite numbers.*; leave it out, or load"):
        encoded(form, *sides)


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_beyond_half_precision_is_refused_by_name(
    bits: int, sign: float, side: int
) -> None:
    sides = keys, values = normal(8, 5, 2, 8).bfloat16(), normal(9, 5, 2, 8).bfloat16()
    form = of(bits, torch.bfloat16)
    sides[side][3, 1, 5] = sign * 140_000  # half of it, in four channels, of a key
    with pytest.raises(
        InvalidChunk, match=r"values reach (7.01|1.4)e\+0.*65504.*; give store_bits=16"
    ):
        encoded(form, keys, values)
    exact = of(16, torch.bfloat16)
    assert torch.equal(exact.values(encoded(exact, keys, values)[0]), values)


@pytest.mark.parametrize("bits", QUANTISED)
def test_the_largest_half_precision_values_are_kept(bits: int) -> None:
    values = torch.tensor([-65504.0, 65504.0, 0.0, 1.0]).view(1, 1, 4)
    form = of(bits, n_kv_heads=1, head_dim=4)
    _, back = there_and_back(form, torch.zeros_like(values), values)
    step = 2 * 65504 / (2**bits - 1)
    assert back.isfinite().all()
    assert float((back - values).abs().max()) <= step / 2 * 1.001


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 5, 32, -4])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(InvalidOption, match=f"store_bits={bits}; allowed: 4, 8, 16"):
        of(bits)

"""The Triton kernel in Triton's interpreter, which needs no GPU, against the plain operations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from samkv_integrations.runtimes.transformers.entries import quantise
from samkv_integrations.runtimes.transformers.entries.quantise import (
    GROUP_TOKENS,
    Entries,
    EntryFormat,
    groups,
)
from tests.support.chunks import encoded
from tests.support.operations import Operations
from tests.support.pretend_device import DEVICE, OnDevice, pretend_device

MODULE = "samkv_integrations.runtimes.transformers.entries.triton_kernels"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton's own functions look at it when imported
    for name in [*sys.modules]:
        if name == MODULE or (name.startswith("triton") and not name.startswith("triton._C")):
            monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)  # a GPU's is compiled


@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(1, 32), (3, 64)])
def test_it_writes_what_the_operations_write(n_kv_heads: int, head_dim: int, kernels: Any) -> None:
    """All entries; some rows of them, in any order, into a part of a working cache."""
    half, kind = head_dim // 2, torch.float32
    form = EntryFormat(bits=4, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=kind)
    random = torch.Generator().manual_seed(head_dim)
    keys, values = (torch.randn(75, n_kv_heads, head_dim, generator=random) for _ in "kv")
    codes, key_range = encoded(form, 3 * keys + 1, values)
    angle = torch.randn(75, 1, half, generator=random)
    group, rows = groups(75, codes.device), torch.tensor([70, 3, 3, 0, 41, *range(30, 64)])
    whole = Entries(
        form=form, codes=codes, key_range=key_range, group=group, cos=angle.cos(), sin=angle.sin()
    )
    lazily = Entries(
        form=form, codes=codes, rows=rows, key_range=key_range, group=group[rows],
        cos=angle.cos()[rows], sin=angle.sin()[rows],
    )  # fmt: skip
    for some in (whole, whole.select(rows), lazily):
        expected, found = torch.zeros(2, 2, n_kv_heads, len(some) + 9, head_dim).transpose(2, 3)
        some.write(*expected[:, 4 : 4 + len(some)])
        kernels.write_entries(
            some.codes, some.rows, some.group, some.tokens, key_range, some.cos[:, 0],
            some.sin[:, 0], quantise._hadamard(half, codes.device),  # noqa: SLF001
            *found[:, 4 : 4 + len(some)],
        )  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(1, 32), (3, 64), (2, 128)])
def test_it_encodes_to_the_bits_of_the_operations(
    n_kv_heads: int, head_dim: int, kind: torch.dtype, kernels: Any
) -> None:
    """Chunks of odd lengths; channels far from zero, constant, tiny, and halfway between codes."""
    form = EntryFormat(bits=4, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=kind)
    random, lengths = torch.Generator().manual_seed(head_dim), [1, 129, 64, 7]
    keys, values = torch.randn(2, 201, n_kv_heads, head_dim, generator=random)
    keys[..., 0] += 300
    keys[..., 1], values[3] = 0.25, 0.0
    keys[..., 2] *= 1e-7
    values[5], values[6:9] = torch.arange(head_dim) % 31 / 2, 1e5 * values[6:9].clamp(-1, 1)
    values[8, :, -1] = 2e6
    keys, values = keys.to(kind), values.to(kind)
    expected = form.encode_chunks(keys, values, lengths)
    tokens, _ = quantise._groups_of(tuple(lengths), keys.device)  # noqa: SLF001
    mixed = form._transform(keys.float())  # noqa: SLF001
    found = kernels.encode_entries(mixed, values, tokens, form.n_bytes, GROUP_TOKENS)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    for side in (mixed, values):
        for wrong in (torch.nan, torch.inf, -torch.inf):
            kept, side[77, -1, 3] = side[77, -1, 3].clone(), wrong
            *_, largest = kernels.encode_entries(mixed, values, tokens, form.n_bytes, GROUP_TOKENS)
            assert not largest.isfinite()
            side[77, -1, 3] = kept


def test_chunks_on_a_device_are_encoded_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one; a stand-in here. Its own two launches come to those that are counted."""
    form = EntryFormat(bits=4, n_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 75, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    lengths = [70, 5]
    expected = form.encode_chunks(keys, values, lengths)

    def encode(mixed: Any, given: Any, tokens: Any, *sizes: int) -> tuple[Tensor, ...]:
        assert sizes == (form.n_bytes, GROUP_TOKENS) and len(tokens) == 3 * GROUP_TOKENS
        with _disable_current_modes():
            return tuple(map(OnDevice, form._encode(mixed.held, given.held, lengths)))  # noqa: SLF001

    with pretend_device():
        there = keys.to(DEVICE), values.to(DEVICE)
        form.encode_chunks(*there, lengths)  # makes what is made once
        with Operations() as many:
            plainly = form.encode_chunks(*there, lengths)
        monkeypatch.setattr(quantise, "encoder_of", lambda form: encode)
        with Operations() as few:
            found = form.encode_chunks(*there, lengths)
        assert (many.counts.total(), few.counts.total()) == (53, 2), (many.counts, few.counts)
        for of_all in (plainly, found):
            for mine, theirs in zip(of_all, expected, strict=True):
                assert torch.equal(mine.cpu(), theirs)

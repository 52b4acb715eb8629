"""KV entries of a context: what is computed from them without keeping it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samkv_integrations.cache.formats.quantise import Entries, EntryFormat, groups

GROUPS, HEADS, DIM = 2, 6, 8
MANY = 40_000  # more than a CPU computes the keys of at once


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entries_of(n_tokens: int, bits: int, dtype: torch.dtype = torch.float32) -> Entries:
    form = EntryFormat(bits=bits, n_kv_heads=GROUPS, head_dim=DIM, dtype=dtype)
    codes, key_range = form.encode(
        normal(0, n_tokens, GROUPS, DIM).to(dtype), normal(1, n_tokens, GROUPS, DIM).to(dtype)
    )
    angle = normal(2, n_tokens, GROUPS, DIM // 2)
    return Entries(
        form=form, codes=codes, key_range=key_range, group=groups(n_tokens, codes.device),
        cos=angle.cos(), sin=angle.sin(),
    )  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("n_tokens", [1, 100, MANY])
def test_logits_are_the_products_with_the_keys(bits: int, n_tokens: int) -> None:
    """Of all entries, and of every third; 1e-5 for sums in another order."""
    entries, query = entries_of(n_tokens, bits), normal(3, HEADS, DIM)
    grouped = query.view(GROUPS, HEADS // GROUPS, DIM)
    for some in (entries, entries.select(torch.arange(0, n_tokens, 3))):
        expected = torch.einsum("grd,ngd->grn", grouped, some.keys_and_values()[0])
        torch.testing.assert_close(some.logits(query), expected, rtol=1e-5, atol=1e-5)


def test_keys_are_rounded_to_the_dtype_and_logits_are_not() -> None:
    """Against float32 with the same codes; 2^-8 is the relative error of bfloat16."""
    entries, query = entries_of(100, 4, torch.bfloat16), normal(3, HEADS, DIM)
    form = EntryFormat(bits=4, n_kv_heads=GROUPS, head_dim=DIM, dtype=torch.float32)
    exact = Entries(
        form=form, codes=entries.codes, key_range=entries.key_range, group=entries.group,
        cos=entries.cos, sin=entries.sin,
    )  # fmt: skip
    keys, expected = entries.keys_and_values()[0], exact.keys_and_values()[0]
    assert keys.dtype == torch.bfloat16
    torch.testing.assert_close(keys.float(), expected, rtol=2**-8, atol=0)
    assert torch.equal(entries.logits(query), exact.logits(query))

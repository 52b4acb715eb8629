"""The Triton kernel in Triton's interpreter, which needs no GPU, against the plain operations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from samkv_integrations.cache.formats import quantise
from samkv_integrations.cache.formats.quantise import Entries, EntryFormat, groups
from tests.support.chunks import encoded

MODULE = "samkv_integrations.cache.formats.triton_kernels"


@pytest.fixture
def write_entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE).write_entries
    sys.modules.pop(MODULE)  # a GPU's is compiled


@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(1, 32), (3, 64)])
def test_it_writes_what_the_operations_write(
    n_kv_heads: int, head_dim: int, write_entries: Callable[..., None]
) -> None:
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
        write_entries(
            some.codes, some.rows, some.group, some.tokens, key_range, some.cos[:, 0],
            some.sin[:, 0], quantise._hadamard(half, codes.device),  # noqa: SLF001
            *found[:, 4 : 4 + len(some)],
        )  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5)

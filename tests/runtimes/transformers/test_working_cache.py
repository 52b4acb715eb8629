"""The working cache of an answer: what a step attends to while it grows."""

from __future__ import annotations

import pytest
import torch

from samkv_integrations.runtimes.transformers.model.attention import attention, suits_products
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    ContextSlots,
    DenseCache,
    LayerEntries,
)

N_PROMPT, N_STEPS, DIM = 470, 175, 64


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_attends_to_all_entries(
    dtype: torch.dtype, by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in larger tensors, and after tokens are taken back, to the last bit."""
    monkeypatch.setattr(
        "samkv_integrations.runtimes.transformers.model.attention._are_faster_for_token",
        lambda: by_products,
    )
    random = torch.Generator().manual_seed(0)
    keys, values, queries = (
        torch.randn(N_PROMPT + N_STEPS, n_heads, DIM, generator=random).to(dtype)
        for n_heads in (2, 2, 6)
    )
    none, prompt = torch.arange(0), torch.arange(N_PROMPT)
    cache = DenseCache(1, N_STEPS)
    cache.take(0, LayerEntries(
        keys=keys[:N_PROMPT], values=values[:N_PROMPT], n_entries=N_PROMPT,
        is_context=prompt < 0,
        context=ContextSlots(tokens=none, slots=none, changed=none, other_slots=prompt),
        queries=queries[-1:].transpose(0, 1), query_slots=none, scaling=0.125,
    ))  # fmt: skip
    outputs = dict[int, torch.Tensor]()
    for n_back in (0, 7):
        cache.rewind(n_back)
        for at in range(cache.lengths[0], N_PROMPT + N_STEPS):
            query, key, value = (each[None, at, :, None] for each in (queries, keys, values))
            found = cache.attend(0, query, key, value, 0.125)
            seen = (side[None, : at + 1].transpose(1, 2).float() for side in (keys, values))
            expected = attention(query.float(), *seen, 0.125, None, False)
            close = {"rtol": 0.02, "atol": 0.005} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(found.float(), expected, **close)
            assert torch.equal(found, outputs.setdefault(at, found))
    assert suits_products(query, at + 1) == (by_products and dtype == torch.bfloat16)

"""The dense cache by itself: what it takes, adds, moves and gives up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine.working_cache import DenseCache, LayerEntries
from samkv_integrations.methods.ape import ApeAttention

GROUPS, HEADS, DIM = 2, 4, 8


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entries_of(n: int, room: int, seed: int = 0) -> LayerEntries:
    """Entries 1 to n - 2 are of the context."""
    is_context = torch.zeros(n, dtype=torch.bool)
    is_context[1:-1] = True
    return LayerEntries(
        keys=normal(seed, n + room, GROUPS, DIM), values=normal(seed + 1, n + room, GROUPS, DIM),
        n_entries=n, is_context=is_context, context=torch.arange(n - 2),
        context_slots=torch.arange(1, n - 1), changed=torch.arange(0),
        other_slots=torch.tensor([0, n - 1]),
        queries=normal(seed + 2, HEADS, 1, DIM), query_slots=torch.tensor([n - 1]), scaling=0.3,
    )  # fmt: skip


def filled(weigh: Any = None, capacity: int = 3) -> tuple[DenseCache, list[LayerEntries]]:
    cache = DenseCache(2, capacity, weigh=weigh)
    given = [entries_of(6, cache.room), entries_of(9, cache.room, seed=10)]
    for layer, entries in enumerate(given):
        cache.take(layer, entries)
    return cache, given


def step(cache: DenseCache, layer: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = normal(seed, 1, HEADS, 1, DIM)
    key, value = normal(seed + 1, 1, GROUPS, 1, DIM), normal(seed + 2, 1, GROUPS, 1, DIM)
    return query, key, value, cache.attend(layer, query, key, value, 0.3)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_attends_to_all_entries_of_its_layer_and_to_itself(layer: int) -> None:
    cache, given = filled()
    n = given[layer].n_entries
    keys, values = given[layer].keys[:n].clone(), given[layer].values[:n].clone()
    for seed in (20, 30, 40):
        query, key, value, output = step(cache, layer, seed)
        keys = torch.cat((keys, key[0].transpose(0, 1)))
        values = torch.cat((values, value[0].transpose(0, 1)))
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            weights = (0.3 * keys[:, group] @ query[0, head, 0]).softmax(0)
            expected = weights @ values[:, group]
            torch.testing.assert_close(output[0, head, 0], expected, rtol=1e-5, atol=1e-5)
    assert cache.lengths[layer] == n + 3 and cache.lengths[1 - layer] == given[1 - layer].n_entries


def test_bytes_are_those_of_the_entries_without_the_room() -> None:
    cache, _ = filled(capacity=100)
    row = 2 * GROUPS * DIM * 4
    assert cache.kv_bytes == cache.prompt_bytes == (6 + 9) * row
    step(cache, 1, 20)
    assert cache.kv_bytes == 16 * row and cache.prompt_bytes == 15 * row


def test_attended_is_what_an_eviction_left_mean_over_heads() -> None:
    cache, given = filled()
    of_chunks = torch.zeros(given[0].n_entries, dtype=torch.bool)
    of_chunks[1:4] = True
    assert cache.attended(0, of_chunks) == 3
    slots = torch.tensor([[0, 1], [1, 2], [2, 5]])  # (K, G): heads keep two and two of them
    cache.keep(0, slots)
    assert cache.attended(0, of_chunks) == 2
    cache.keep(1, torch.tensor([[0, 0], [1, 4]]))
    of_chunks = torch.zeros(given[1].n_entries, dtype=torch.bool)
    of_chunks[1:4] = True
    assert cache.attended(1, of_chunks) == 0.5


def test_an_answer_s_tokens_are_none_of_the_context() -> None:
    cache, given = filled(ApeAttention())
    step(cache, 0, 20)
    flags = [*given[0].is_context.tolist(), False]
    assert cache.is_context(0).tolist() == [flags] * GROUPS


@pytest.mark.parametrize("weigh", [None, ApeAttention()], ids=["plain", "weighed"])
def test_kept_entries_move_with_all_that_belongs_to_them(weigh: Any) -> None:
    """Each head its own, and there is room for the answer."""
    cache, given = filled(weigh)
    slots = torch.tensor([[0, 2], [3, 4], [5, 5]])
    keys, values = given[0].keys.clone(), given[0].values.clone()
    cache.keep(0, slots)
    assert cache.lengths == [3, 9] and len(cache.keys[0]) == 3 + 3
    for place, of_heads in enumerate(slots.tolist()):
        for head, slot in enumerate(of_heads):
            assert torch.equal(cache.keys[0][place, head], keys[slot, head])
            assert torch.equal(cache.values[0][place, head], values[slot, head])
            if weigh is not None:
                flag = bool(given[0].is_context[slot])
                assert bool(cache.is_context(0)[head, place]) == flag
    cache.keep(1, None)
    assert len(cache.keys[1]) == 12 and torch.equal(cache.keys[1][:9], given[1].keys[:9])


@pytest.mark.parametrize("slot", [2, torch.tensor([2, 4])], ids=["all heads", "one a head"])
def test_the_last_entry_takes_the_place_of_one_given_up(slot: Any) -> None:
    cache, given = filled()
    keys = given[0].keys.clone()
    cache.evict(0, slot)
    assert cache.lengths[0] == 5
    of_heads = [slot] * GROUPS if isinstance(slot, int) else slot.tolist()
    for head, freed in enumerate(of_heads):
        for place in range(5):
            expected = keys[5 if place == freed else place, head]
            assert torch.equal(cache.keys[0][place, head], expected)

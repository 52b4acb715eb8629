"""Beginnings of prompts in memory: which is found, how much of it, and what makes room."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.engine.prefix_cache import LEAST, PrefixCache

TOKEN_BYTES = 2 * 2 * 4 * 4
"""Of an entry of these tests: keys and values of two layers, one head of 4 channels, float32."""


def entries(token_ids: Sequence[int]) -> Tensor:
    """(S, G, D) that tell each token and its place, so that a wrong one shows."""
    at = torch.arange(len(token_ids), dtype=torch.float32)
    return (torch.tensor(token_ids) * 1000.0 + at)[:, None, None].expand(-1, 1, 4)


def leave(cache: PrefixCache, token_ids: Sequence[int], made_by: str = "w", room: int = 3) -> bool:
    """Hold a beginning as a pass does; whether it was asked for."""
    found = cache.find(made_by, torch.tensor([*token_ids, 0]))
    n_held = 0 if found is None else found.n_tokens
    new = cache.begin(made_by, torch.tensor(token_ids), n_held, TOKEN_BYTES)
    if new is None:
        return False
    for _ in range(2):
        side = torch.cat((entries(token_ids), torch.zeros(room, 1, 4)))
        new.take(side, -side)
    cache.keep(new)
    return True


def taken(cache: PrefixCache, token_ids: Sequence[int], made_by: str = "w") -> int:
    """How many first tokens of a prompt are found; their entries are looked at."""
    found = cache.find(made_by, torch.tensor(token_ids))
    if found is None:
        return 0
    expected = entries(token_ids)[: found.n_tokens]
    for layer in range(2):
        keys, values = found.of_layer(layer, found.n_tokens)
        assert torch.equal(keys, expected) and torch.equal(values, -expected)
    return found.n_tokens


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(
    held=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=5),
    asked=st.lists(st.integers(0, 1), min_size=1, max_size=40),
)
def test_the_longest_beginning_that_agrees_with_any_is_taken(
    held: list[list[int]], asked: list[int]
) -> None:
    shared = [1, 1, 0, 1, 0, 0, 1, 0, 1, 1]
    cache, prompt = PrefixCache(2**20), shared + asked
    for each in held:
        leave(cache, shared + each)
    longest = max((common(shared + each, prompt[:-1]) for each in held), default=0)
    found = taken(cache, prompt)
    assert longest - LEAST < found <= longest  # what adds fewer tokens is not held


def test_a_pass_that_began_before_they_were_cleared_leaves_nothing() -> None:
    """Its prompt may hold the very text that was deleted meanwhile."""
    cache = PrefixCache(2**20)
    leave(cache, range(30))
    new = cache.begin("w", torch.arange(100, 130), 0, TOKEN_BYTES)
    assert new is not None
    cache.clear()
    assert taken(cache, range(30)) == 0
    for _ in range(2):
        new.take(entries(range(100, 130)), -entries(range(100, 130)))
    cache.keep(new)
    assert taken(cache, range(100, 130)) == 0

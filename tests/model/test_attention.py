"""The attention of steps and passes, against softmax written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samkv_integrations.model.attention import attention

HEADS, DIM, KEYS, SCALING = 6, 8, 37, 0.4


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Head by head, with the key-value head of its group."""
    outputs = []
    for head in range(HEADS):
        group = head * key.shape[1] // HEADS
        logits = query[:, head] @ key[:, group].mT * SCALING
        if mask is not None:
            own = mask.expand(len(query), HEADS, query.shape[2], key.shape[2])[:, head]
            logits = (
                logits.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else logits + own
            )
        outputs.append(logits.softmax(-1) @ value[:, group])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("n_groups", [1, 2, 6])
@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("masked", ["no", "of each head", "of all heads", "of tokens"])
def test_heads_attend_to_the_keys_of_their_group(n_groups: int, n_tokens: int, masked: str) -> None:
    """Of one token and of several, two sequences, keys as a cache holds them: (S, G, D)."""
    query = normal(0, 2, HEADS, n_tokens, DIM)
    key, value = (normal(seed, 2, KEYS, n_groups, DIM).transpose(1, 2) for seed in (1, 2))
    mask = {
        "no": None,
        "of each head": 3 * normal(3, 1, HEADS, 1, KEYS).expand(-1, -1, n_tokens, -1),
        "of all heads": 3 * normal(3, 1, 1, n_tokens, KEYS),
        "of tokens": normal(3, 2, 1, n_tokens, KEYS) > -0.5,
    }[masked]
    output = attention(query, key, value, SCALING, mask, False)
    assert output.shape == query.shape
    expected = written_out(query, key, value, mask)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_the_first_token_of_all_sees_itself_only() -> None:
    query, key, value = (normal(seed, 1, n, 1, DIM) for seed, n in ((0, HEADS), (1, 2), (2, 2)))
    output = attention(query, key, value, SCALING, None, True)
    torch.testing.assert_close(output, value.repeat_interleave(HEADS // 2, 1))

"""The attention of steps and passes, against softmax written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.model.attention import attention
from tests.support.covering import covering
from tests.support.tensors import normal

HEADS, DIM, KEYS, SCALING = 6, 8, 37, 0.4


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


@pytest.mark.parametrize(
    ("products", "dtype", "masked", "of_family", "shape"),
    covering(
        [False, True],
        [torch.bfloat16, torch.float16],
        ["no", "causal", "of tokens", "of a row", "added", "of heads"],
        ["llama", "gemma2", "gpt_oss"],
        [(77, 200), (1, 130), (20, 99), (192, 321)],
        times=3,
    ),
)
def test_zeros_and_products_in_16_bits_change_nothing(
    products: bool, dtype: torch.dtype, masked: str, of_family: str, shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against the same numbers in float32, which get none; nor are gradients of them NaN.

    products: whether this processor has attention with a mask computed as products of matrices.
    """
    monkeypatch.setattr(
        "samkv_integrations.runtimes.transformers.model.attention.products_are_faster", lambda: True
    )
    n_rows, n_keys = shape
    n_keys = n_rows if masked == "causal" else n_keys
    shapes = ((HEADS, n_rows), (2, n_keys), (2, n_keys))
    given = [normal(at, 2, *shape, DIM).to(dtype) for at, shape in enumerate(shapes)]
    bound = 2.0 if of_family == "gemma2" else None
    sinks = normal(4, HEADS).to(dtype) if of_family == "gpt_oss" else None
    for each in given:
        each.requires_grad_()
    mask = {
        "of tokens": normal(3, n_rows, n_keys) > -0.5,
        "of a row": normal(3, 2, 1, 1, n_keys) > -0.5,
        "of heads": normal(3, 1, HEADS, n_rows, n_keys) > -0.5,
        "added": normal(3, n_rows, n_keys).to(dtype),
    }.get(masked)
    causal = masked == "causal"
    output = attention(
        *given, SCALING, mask, causal, score_cap=bound, sinks=sinks, may_round=products
    )
    in_full = mask if mask is None or mask.dtype == torch.bool else mask.float()
    exact = [each.detach().float().requires_grad_() for each in given]
    expected = attention(*exact, SCALING, in_full, causal, score_cap=bound, sinks=sinks)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
    output.float().sum().backward()
    expected.sum().backward()
    for mine, other in zip(given, exact, strict=True):
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=0.1, atol=0.1)

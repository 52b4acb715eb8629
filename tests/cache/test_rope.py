"""Rotating and un-rotating against the models themselves, on two paths that share nothing.

(a) A key as the model caches it, un-rotated, is the output of the key projection (after the key
norm where the family has one). (b) A key cached at p, moved to q, is the key that the model itself
caches at q.

Tolerances are relative to r, the length of the two coordinates that turn together, because a turn
mixes only these two. With u the unit roundoff of the dtype, a rotation in that dtype rounds each of
two products and their sum: at most 2.5 u r a coordinate, 3.5 u r for the pair; a rotation in
float32 rounds only its result, u r for the pair. So at worst (a) is off by 3.5 + 1 = 4.5 u r, and
(b) by 3.5 + 1 + 1 on one side and 3.5 on the other, 9 u r. In float32 the roundings of the float32
arithmetic itself count as well: 3.5 u r more for each step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from samkv_integrations.cache.formats.quantise import rotate, unrotate
from samkv_integrations.model.model import Model
from tests.support.models import FAMILIES, byte_tokenizer, hf_model

DTYPES = (torch.float32, torch.bfloat16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
WORST = {torch.float32: (8.0, 16.0), torch.bfloat16: (4.5, 9.0)}  # (a), (b), in u r
TOKENS = 48


@cache
def model_of(family: str, dtype: torch.dtype) -> Model:
    """As transformers loads it: weights in ``dtype``, frequencies of RoPE in float32."""
    original = hf_model(family)
    hf = AutoModelForCausalLM.from_config(original.config, dtype=dtype)
    hf.load_state_dict(original.state_dict())
    assert hf.model.rotary_emb.inv_freq.dtype == torch.float32
    return Model(hf, byte_tokenizer(bos=True), family)


def own_keys(model: Model, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers computes by itself, both (L, batch, T, G, D): keys before RoPE, as they
    leave the last module before it, and keys as they stand in its own cache."""
    before: list[Tensor] = []

    def note(module: Any, args: Any, output: Tensor) -> None:
        before.append(output.view(*ids.shape, model.n_kv_heads, model.head_dim))

    last = [getattr(b.self_attn, "k_norm", b.self_attn.k_proj) for b in model.hf.model.layers]
    hooks = [module.register_forward_hook(note) for module in last]
    try:
        with torch.inference_mode():
            cached = model.hf(ids, position_ids=positions, use_cache=True).past_key_values
    finally:
        for hook in hooks:
            hook.remove()
    rotated = torch.stack([layer.keys.transpose(1, 2) for layer in cached.layers])
    return torch.stack(before), rotated


def pair_length(x: Tensor) -> Tensor:
    """Length of the two coordinates that turn together, at both of their places."""
    first, second = x.double().chunk(2, dim=-1)
    length = (first.square() + second.square()).sqrt()
    return torch.cat((length, length), dim=-1)


def assert_turned(actual: Tensor, expected: Tensor, steps: float) -> None:
    """Every pair of coordinates is within ``steps`` u of its own length."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = pair_length(actual.double() - expected.double())
    limit = steps * UNIT[actual.dtype] * pair_length(expected)
    worst = float((error / limit.clamp(min=1e-30)).max())
    assert worst <= 1, f"{worst:.2f} times the limit of {steps} units"


def random_ids(*shape: int) -> Tensor:
    return torch.randint(6, 262, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unrotated_key_is_the_key_before_rope(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    # near the start, where every angle is small, and far from it
    for start in (0, 1, 700, 4096 - TOKENS):
        positions = torch.arange(start, start + TOKENS)
        before, rotated = own_keys(model, random_ids(1, TOKENS), positions[None])
        cos, sin = model.rotation(positions).of(0)
        assert cos.dtype == dtype
        for layer in range(model.n_layers):
            plain = unrotate(rotated[layer, 0], cos, sin)
            assert_turned(plain, before[layer, 0], WORST[dtype][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_moved_to_another_position_is_the_model_s_own_there(
    family: str, dtype: torch.dtype
) -> None:
    """Each token is a prompt of its own: it attends to itself alone, so nothing but the rotation of
    its keys depends on its position, in any layer."""
    model = model_of(family, dtype)
    ids = random_ids(TOKENS, 1)
    generator = torch.Generator().manual_seed(2)
    start = torch.randint(0, 4096, (TOKENS,), generator=generator)
    goal = torch.randint(0, 4096, (TOKENS,), generator=generator)
    start[0], goal[0], start[1], goal[1] = 0, 4095, 4095, 0
    _, at_start = own_keys(model, ids, start[:, None])
    _, at_goal = own_keys(model, ids, goal[:, None])
    from_cos, from_sin = model.rotation(start).of(0)
    to_cos, to_sin = model.rotation(goal).of(0)
    for layer in range(model.n_layers):
        moved = rotate(unrotate(at_start[layer, :, 0], from_cos, from_sin), to_cos, to_sin)
        assert_turned(moved, at_goal[layer, :, 0], WORST[dtype][1])
    apart = pair_length(at_start[0, :, 0].double() - at_goal[0, :, 0].double())
    assert float((apart / pair_length(at_goal[0, :, 0])).median()) > 0.1, "the positions differ"

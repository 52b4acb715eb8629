"""Hooks of all modules: they see what transformers' modules would show them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.support.models import tiny_model


@pytest.mark.parametrize("n_tokens", [1, 13, 64])
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "mlp.gate_proj"])
def test_what_a_hook_of_all_modules_was_given_does_not_change(name: str, n_tokens: int) -> None:
    model = tiny_model("llama")
    part = model.hf.model.layers[0].get_submodule(name)
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, given: object, output: Tensor) -> None:
        if module is part:
            seen.append((output, output.clone()))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return model.attention(layer, query, key, value, scaling, None, True)

    hook = register_module_forward_hook(note)
    try:
        with torch.inference_mode():
            hidden = model.embed(torch.arange(6, 6 + n_tokens)[None])
            model.layer(0, hidden, *model.rotation(torch.arange(n_tokens)).of(0), attend)
    finally:
        hook.remove()
    ((now, then),) = seen
    assert torch.equal(now, then)

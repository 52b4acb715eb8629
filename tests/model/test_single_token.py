"""Linear layers over one token: the same results, whatever the shapes, and no module changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from samkv_integrations.model import attention
from samkv_integrations.model.attention import InParts, for_single_token

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (262, 64), (8, 1), (16, 4096), (1, 3)])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (), (1, 3), (2, 1)])
@torch.inference_mode()
def test_results_are_those_of_the_layer(
    shape: tuple[int, int], rows: tuple[int, ...], bias: bool
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(shape[1], shape[0], bias=bias).double(), torch.randn(*rows, shape[1])
    exact = layer(x.double())
    layer = layer.float()
    with InParts():
        found = layer(x)
        called_by_name = linear(x, weight=layer.weight, bias=layer.bias)
    assert found.shape == exact.shape and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(called_by_name.double(), exact, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_transposed_weight_is_as_good() -> None:
    weight = torch.randn(64, 32).T
    x = torch.randn(1, 64)
    with InParts():
        torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_other_dtypes_are_left_alone() -> None:
    layer, x = nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(1, 64, dtype=torch.bfloat16)
    with for_single_token(CPU, torch.bfloat16):
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("faster", [False, True])
def test_a_trial_decides(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    monkeypatch.setattr(attention, "parts_are_faster", lambda: faster)
    assert isinstance(for_single_token(CPU, torch.float32), InParts) == faster

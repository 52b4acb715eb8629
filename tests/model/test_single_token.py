"""Linear layers over one token: the same results, whatever the shapes, and no module changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from samkv_integrations.model.attention import InParts


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

"""Linear layers over a single token, which a step of one answer consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PARTS = 8  # more make no difference
_WIDEST = 2048  # inputs of a layer; above, MKL's product of a matrix and a vector is as fast


def for_single_token(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """A block in which linear layers over one token are computed as a few products in a batch.

    With MKL, float32 weights are then read about twice as fast (docs/decisions.md); elsewhere
    nothing changes. Results differ in the last bits only. No module is changed.
    """
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return _InParts()
    return nullcontext()


class _InParts(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is F.linear and not kwargs and _suits(args[0], args[1]):
            return _linear(*args)
        return func(*args, **(kwargs or {}))


def _suits(x: Tensor, weight: Tensor) -> bool:
    n_outputs, n_inputs = weight.shape
    return (
        x.numel() == n_inputs <= _WIDEST
        and n_outputs % _PARTS == 0
        and weight.is_contiguous()
        and x.dtype == weight.dtype
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    parts = weight.view(_PARTS, -1, weight.shape[1])
    token = x.reshape(1, -1).t().expand(_PARTS, -1, 1)
    product = torch.bmm(parts, token).view(*x.shape[:-1], -1)
    return product if bias is None else product + bias

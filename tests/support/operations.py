"""Counts the operations of torch that compute or copy something; on a GPU each is a launch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.pretend_device import OnDevice


class Operations(TorchDispatchMode):
    """Under `torch.inference_mode` what is made of other operations, such as attention, is one.

    counts: by name, without views, memory that nothing is written to, and what returns its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        given, made = _storages((args, kwargs)), _storages(result)
        is_number = not isinstance(result, Tensor | tuple | list)
        is_written = func._schema.is_mutable  # noqa: SLF001
        if (is_written or is_number or not made <= given) and "empty" not in name:
            self.counts[name] += 1
        return result


def _storages(value: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    held = [each.held if isinstance(each, OnDevice) else each for each in tensors]
    return {each.untyped_storage().data_ptr() for each in held if each.numel()}

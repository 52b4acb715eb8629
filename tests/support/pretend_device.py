"""A CUDA device that is not there: real numbers that say that they are on it, and rules as strict.

Whoever mixes tensors of two devices gets the error that CUDA gives, and whatever makes the host
wait for the device is counted. The numbers themselves are computed on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("cuda:0")

aten = torch.ops.aten
# What a kernel writes and the host reads: a number, a truth, or how many elements there are.
_WAITING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,  # of a tensor of counts
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


_MIXED = f"Expected all tensors to be on the same device, but found {DEVICE} and"
_ACTIVE: list[Device] = []


class OnDevice(Tensor):
    """A tensor of the device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a tensor of the device outside of `device()`")

    __torch_function__ = torch._C._disabled_torch_function_impl

    # What follows asks for a build with CUDA before it comes to `Device`, or refuses subclasses.

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __invert__(self) -> Tensor:
        return torch.bitwise_not(self)

    def float(self) -> Tensor:
        return self.to(torch.float32)

    def long(self) -> Tensor:
        return self.to(torch.int64)

    def bool(self) -> Tensor:
        return self.to(torch.bool)

    def cpu(self) -> Tensor:
        if _get_current_dispatch_mode() is None:  # a thread besides the one that has the device
            _active().waits["to the host"] += 1
            return self.held.clone()
        return self.to("cpu")

    def contiguous(self) -> Tensor:
        return torch.clone(self, memory_format=torch.contiguous_format)

    def item(self) -> Any:
        _active().waits["a number"] += 1
        return self.held.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __getitem__(self, index: Any) -> Tensor:
        return OnDevice(self.held[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        places = _index(index)
        if isinstance(value, Tensor) and not isinstance(value, OnDevice):
            if value.dim() and _tensors(places):
                raise RuntimeError(f"{_MIXED} cpu")
            _active().waits["to the device"] += 1
        self.held[places] = _held(value)

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"


class Device(TorchDispatchMode):
    """While active, tensors can be made on the device and moved to and from it.

    waits: how often the host has waited for the device, by the operation that made it wait. A copy
    from the host's memory counts too: torch waits for it, but from pinned memory if it is told to.
    n_operations: on the device, views included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.n_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        packet, tensors = func.overloadpacket, _tensors((args, kwargs))
        is_here = any(isinstance(tensor, OnDevice) for tensor in tensors)
        goes_there = is_here
        if packet is aten._fused_sdp_choice:
            return 0  # the plain computation, of which every step is seen
        if packet is aten._has_compatible_shallow_copy_type:
            return False
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            args, kwargs = tree_map(_numbered, (args, kwargs))
            with self:  # under `inference_mode` what is made of other operations comes whole
                return func.decompose(*args, **kwargs)
        self.n_operations += is_here
        if (place := kwargs.get("device")) is not None:
            goes_there = torch.device(place).type == DEVICE.type
            kwargs["device"] = torch.device("cpu")
        if packet is aten._to_copy:
            may_go_on = getattr(args[0], "is_told_pinned", False) and kwargs.get("non_blocking")
            if is_here != goes_there and not may_go_on:
                self.waits["to the device" if goes_there else "to the host"] += 1
        elif packet is aten.copy_:
            if isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
                self.waits["to the device" if is_here else "to the host"] += 1
        elif is_here:
            self._check(func, args, kwargs, tensors)
        if is_pinned := kwargs.get("pin_memory", False):
            kwargs["pin_memory"] = False
        found = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
        args, kwargs = tree_map(_held, (args, kwargs))
        result = func(*args, **kwargs)
        if is_pinned:
            result.is_told_pinned = True
        if not goes_there:
            return result
        leaves, shape = tree_flatten(result)
        wrapped = [
            (found[id(leaf)] if id(leaf) in found else OnDevice(leaf))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        return tree_unflatten(wrapped, shape)

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        packet = func.overloadpacket
        name = packet.__name__
        if packet in _INDEXING:
            _index(args[1])
            tensors = _tensors((args[0], args[2:]))
        elif packet in _WAITING and not (name == "repeat_interleave" and "int" in str(func)):
            self.waits[name] += 1
        strangers = [t for t in tensors if not isinstance(t, OnDevice) and t.dim()]
        if strangers or not any(isinstance(tensor, OnDevice) for tensor in tensors):
            raise RuntimeError(f"{_MIXED} cpu ({func})")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _index(index: Any) -> Any:
    """The index with the numbers of what is on the device in it; counts what it has to wait for."""
    for tensor in _tensors(index):
        if not isinstance(tensor, OnDevice) and tensor.dim():
            _active().waits["indices of the host"] += 1
        if tensor.dtype in (torch.bool, torch.uint8):
            _active().waits["a mask as an index"] += 1
    return tree_map(_held, index)


def _active() -> Device:
    return _ACTIVE[-1]


def _numbered(value: Any) -> Any:
    is_there = isinstance(value, torch.device) and value.type == DEVICE.type
    return DEVICE if is_there else value


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


@contextmanager
def pretend_device() -> Iterator[Device]:
    """The device, for as long as the context lasts."""
    lazy_init = torch.cuda._lazy_init
    torch.cuda._lazy_init = lambda: None
    try:
        with torch.inference_mode(), Device() as device:
            _ACTIVE.append(device)
            yield device
    finally:
        _ACTIVE.pop()
        torch.cuda._lazy_init = lazy_init

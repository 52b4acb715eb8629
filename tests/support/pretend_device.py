"""A CUDA device that is not there: real numbers that say that they are on it, and rules as strict.

Whoever mixes tensors of two devices gets the error that CUDA gives, and whatever makes the host
wait for the device is counted. The numbers themselves are computed on the CPU, what a `Stream` is
told as late as CUDA may do it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from samkv_integrations.runtimes.transformers.entries.hot import copying

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

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return aten.copy_(self, source, non_blocking)

    def record_stream(self, stream: Stream) -> None:
        _active().memory[_address(self)].recorded.append(stream)

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


@dataclass
class Memory:
    """Memory of the device that a tensor took.

    since: how many operations had been told to the device. recorded: see `Tensor.record_stream`.
    """

    since: int
    recorded: list[Stream] = field(default_factory=list)


class Stream:
    """Copies into the device's memory, none of which is done before another stream waits for it.

    behind: how many operations had been told to the device when this stream last waited for it.
    """

    def __init__(self, device: object = None) -> None:
        self.behind, self.n_told = 0, 0
        self.told: list[tuple[int, Tensor, Tensor]] = []  # number, into, from

    def tell(self, into: OnDevice, source: Tensor) -> None:
        memory = _active().memory[_address(into)]
        assert self.behind >= memory.since, "memory that the device may still use"
        assert self in memory.recorded, "memory that may be used again before the copy is done"
        self.n_told += 1
        self.told.append((self.n_told, into.held, source))
        _active().log.append(f"copy {self.n_told}")
        with _disable_current_modes():
            into.held.view(torch.uint8).fill_(255)  # what is read before the copy is done

    def record_event(self) -> Event:
        return Event(self, self.n_told)

    def wait_stream(self, other: Stream) -> None:
        self.behind = _active().n_told
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if event.stream is not _active().computes:
            _active().log.append(f"wait {event.until}")
        while not event.query():
            _, into, source = event.stream.told.pop(0)
            with _disable_current_modes():  # it was counted when it was told
                into.copy_(source)


@dataclass
class Event:
    """That a stream has done what it was told until then, ``until`` copies."""

    stream: Stream
    until: int

    def query(self) -> bool:
        return not self.stream.told or self.stream.told[0][0] > self.until


class Device(TorchDispatchMode):
    """While active, tensors can be made on the device and moved to and from it.

    waits: how often the host has waited for the device, by the operation that made it wait. A copy
    from the host's memory counts too: torch waits for it, but from pinned memory if it is told to.
    n_operations: on the device, views included.
    computes, stream: the stream on which all begins, and the one that is told now.
    log: what streams were told: copies by number, and to wait for copies up to a number.
    memory: by address, of the tensor that took it last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.n_operations = 0
        self.computes = self.stream = Stream()
        self.n_told = 0
        self.log: list[str] = []
        self.memory: dict[int, Memory] = {}
        self._pinned: dict[int, Any] = {}  # storages by address, which nothing else takes then

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def _made(self, held: Tensor, given: set[int]) -> OnDevice:
        """given: addresses of what it was made of, of which it may be a view."""
        if _address(held) not in given:
            self.memory[_address(held)] = Memory(self.n_told)
        return OnDevice(held)

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
        self.n_told += 1
        if (place := kwargs.get("device")) is not None:
            goes_there = torch.device(place).type == DEVICE.type
            kwargs["device"] = torch.device("cpu")
        if packet is aten._to_copy:
            may_go_on = self._is_pinned(args[0]) and kwargs.get("non_blocking")
            if is_here != goes_there and not may_go_on:
                self.waits["to the device" if goes_there else "to the host"] += 1
        elif packet is aten.copy_:
            may_go_on = args[2:] == (True,) and any(map(self._is_pinned, args[:2]))
            if isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice) and not may_go_on:
                self.waits["to the device" if is_here else "to the host"] += 1
        elif is_here:
            self._check(func, args, kwargs, tensors)
        if self.stream is not self.computes and goes_there and not func.is_view:
            assert packet is aten.copy_, f"{func}, which no stream here can be told"
            assert args[2:] == (True,), "the host would wait for the copy"
            self.stream.tell(args[0], args[1])
            return args[0]
        if is_pinned := kwargs.get("pin_memory", False):
            kwargs["pin_memory"] = False
        found = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
        given = {_address(tensor) for tensor in found.values()}
        args, kwargs = tree_map(_held, (args, kwargs))
        result = func(*args, **kwargs)
        if is_pinned:
            self._pinned[_address(result)] = result.untyped_storage()
        if not goes_there:
            return result
        leaves, shape = tree_flatten(result)
        wrapped = [
            (found[id(leaf)] if id(leaf) in found else self._made(leaf, given))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        return tree_unflatten(wrapped, shape)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._pinned

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


def _address(tensor: Tensor) -> int:
    """Of the memory that a tensor and its views share."""
    return _held(tensor).untyped_storage().data_ptr()


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
    copying.cache_clear()
    with torch.inference_mode(), Device() as device, mock.patch.multiple(
        torch.cuda, _lazy_init=lambda: None, Stream=Stream, stream=device.on,
        current_stream=lambda of: device.stream,
    ):  # fmt: skip
        _ACTIVE.append(device)
        try:
            yield device
        finally:
            _ACTIVE.pop()
            copying.cache_clear()

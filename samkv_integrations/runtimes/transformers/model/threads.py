"""Threads of a CPU: a short pass shares out its products, and runs small operations on one thread.

Between two operations OpenMP's threads wait for each other. If a process has more of them than the
machine has cores, they sleep, and to wake them takes longer than a small operation
(docs/decisions.md). Results are the same to the last bit.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")

_SMALL = 1 << 18
"""Most numbers of the hidden states of a pass whose other operations run on one thread."""


class _Products(threading.local):
    """The number of threads for products, while other operations run on one; else 0."""

    n_threads = 0


_products = _Products()


@contextmanager
def small_operations_on_one_thread(hidden: Tensor) -> Iterator[None]:
    """Inside this block only `on_all_threads` uses several threads, if ``hidden`` is small.

    Only the calling thread is concerned. `torch.set_num_threads` would also set the number for
    every thread that computes for the first time meanwhile, and for good.
    """
    n_threads = torch.get_num_threads()
    is_suited = hidden.is_cpu and n_threads > 1 and hidden.numel() <= _SMALL
    use = _openmp() if is_suited else None
    if use is None:
        yield
        return
    _products.n_threads = n_threads
    use(1)
    try:
        yield
    finally:
        _products.n_threads = 0
        use(n_threads)


def on_all_threads(work: Callable[[], _Made]) -> _Made:
    """The result of ``work``, run on all threads also inside `small_operations_on_one_thread`."""
    n_threads = _products.n_threads
    use = _openmp() if n_threads not in (0, torch.get_num_threads()) else None
    if use is None:
        return work()
    use(n_threads)
    try:
        return work()
    finally:
        use(1)


@cache
def _openmp() -> Callable[[int], object] | None:
    """OpenMP's ``omp_set_num_threads`` of the calling thread; None if PyTorch does not heed it."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}"
    try:
        use: Callable[[int], object] = ctypes.CDLL(str(library)).omp_set_num_threads
    except (OSError, AttributeError):  # Windows, or PyTorch built without OpenMP
        return None
    n_threads = torch.get_num_threads()
    use(1)
    is_heeded = torch.get_num_threads() == 1
    use(n_threads)
    return use if is_heeded else None

"""Peak memory of a call: what is alive at once of all that is allocated while it runs.

On a CPU, allocations of torch's CPU allocator by the thread that asks (tensors and their scratch
space; not what libraries such as oneDNN take for themselves, no mapped files, nothing of other
threads), and apart from them those of Python in all threads (``bytes`` and arrays that files are
read into, objects). On CUDA, torch's allocator on the device. What was alive before the call does
not count: no weights, nothing of earlier calls.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Most bytes that were alive at once, above those before: torch's, and Python's own."""

    tensor_bytes: int
    python_bytes: int


def peak_of(call: Callable[[], object], device: torch.device) -> Peak:
    """The peak while ``call`` runs, which takes longer so: nothing that is timed belongs here."""
    # What earlier calls left in cycles would be freed while this one runs, and lower its peak.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        python_bytes = _python_peak(call)
        peak = torch.cuda.max_memory_allocated(device) - before
        return Peak(tensor_bytes=peak, python_bytes=python_bytes)
    # Some builds of the profiler write to standard error whenever it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        python_bytes = _python_peak(call)
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    return Peak(tensor_bytes=highest(events), python_bytes=python_bytes)


def highest(events: Iterable[tuple[int, int]]) -> int:
    """Most bytes alive at once. events: (time, bytes), the bytes negative where they are freed.

    Freeing what was allocated before the first event lowers what is alive, as it does.
    """
    alive = peak = 0
    for _, n_bytes in sorted(events, key=lambda event: event[0]):  # stable: ties stay as they came
        alive += n_bytes
        peak = max(peak, alive)
    return peak


def _python_peak(call: Callable[[], object]) -> int:
    """Most bytes that Python's allocator held while ``call`` ran, above those before."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        if not was_tracing:
            tracemalloc.stop()

"""Many small operations, on a thread that has one thread of PyTorch's: more would wait longer."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor


def on_one_thread(work: Callable[[], Tensor]) -> Tensor:
    """What ``work`` returns or raises.

    On a thread of its own, since PyTorch would hand a number that is set here for a moment to every
    thread of the process that first computes in that moment, for good.
    """
    if torch.get_num_threads() == 1:
        return work()
    is_inference = torch.is_inference_mode_enabled()

    def run() -> Tensor:
        with torch.inference_mode(is_inference):
            return work()

    return _thread(os.getpid()).submit(run).result()


@lru_cache(maxsize=1)
def _thread(pid: int) -> ThreadPoolExecutor:
    """Not a parent process's, which has no threads here."""
    n_threads = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix="samkv-one-thread")
    thread.submit(torch.get_num_threads).result()  # or its first operation would set the number
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(n_threads)  # what threads that begin from now on have, too
    return thread

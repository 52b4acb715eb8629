"""Work that would hold up an event loop, such as reading files, in threads of its own."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@lru_cache(maxsize=1)
def _threads(pid: int) -> ThreadPoolExecutor:
    """Not asyncio's own, which others wait for; nor a parent process's, which has no threads."""
    return ThreadPoolExecutor(32, thread_name_prefix="samkv-off-loop")


async def off_loop(
    work: Callable[_Given, _Made], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Made:
    """What ``work`` returns or raises, from a thread that sees the caller's context variables."""
    call = partial(contextvars.copy_context().run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), call)

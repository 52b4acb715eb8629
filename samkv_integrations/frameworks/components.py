"""Asynchronous twins of the methods of frameworks' components."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeVar

from samkv_integrations.serving.stream import off_loop

_Made = TypeVar("_Made")


def twin(method: Callable[..., _Made]) -> Callable[..., Coroutine[Any, Any, _Made]]:
    """An asynchronous version of the method, which runs it in a thread.

    If a subclass overrides the method, the twin runs the override.
    """

    @wraps(method)
    async def asynchronous(self: object, *args: Any, **kwargs: Any) -> _Made:
        call: Callable[[], _Made] = partial(getattr(self, method.__name__), *args, **kwargs)
        return await off_loop(call)

    return asynchronous

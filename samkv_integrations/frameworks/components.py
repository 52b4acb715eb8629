"""What components of frameworks share beside an engine: asynchronous twins of their methods."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeVar

from samkv_integrations.serving.stream import off_loop

_Made = TypeVar("_Made")


def twin(method: Callable[..., _Made]) -> Callable[..., Coroutine[Any, Any, _Made]]:
    """The same method for tasks: it runs off the event loop.

    If a subclass overrides the method, its twin runs that.
    """

    @wraps(method)
    async def asynchronous(self: object, *args: Any, **kwargs: Any) -> _Made:
        call: Callable[[], _Made] = partial(getattr(self, method.__name__), *args, **kwargs)
        return await off_loop(call)

    return asynchronous

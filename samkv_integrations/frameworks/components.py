"""What components of frameworks share beside an engine: asynchronous twins, checks of texts.

Components are imported before there is an engine. So what comes with the engine's modules is
imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeVar

_Made = TypeVar("_Made")


def twin(method: Callable[..., _Made]) -> Callable[..., Coroutine[Any, Any, _Made]]:
    """The same method for tasks: it runs off the event loop.

    If a subclass overrides the method, its twin runs that.
    """

    @wraps(method)
    async def asynchronous(self: object, *args: Any, **kwargs: Any) -> _Made:
        from samkv_integrations.serving.stream import off_loop

        call: Callable[[], _Made] = partial(getattr(self, method.__name__), *args, **kwargs)
        return await off_loop(call)

    return asynchronous


def normalise(text: str) -> str:
    """The body of a chunk, which is what is cached: its text without surrounding white space."""
    from samkv_integrations.store.chunk import normalise

    return normalise(text)


def is_handle(text: str) -> bool:
    """Whether ``text`` has the form of a handle, issued or not, and is nothing else."""
    from samkv_integrations.prompt.handles import is_handle

    return is_handle(text)


def check_text(what: str, text: object) -> None:
    """Raises InvalidOption unless ``text`` is a string; what: the name of the argument."""
    from samkv_integrations.prompt.rag_template import check_text

    check_text(what, text)

"""Retrieved chunks, announced to an engine before the prompt that holds them."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import ChunkNotCached
from samkv_integrations.prompt.resolve import OnMiss


def announce(
    engine: Engine, chunks: Sequence[tuple[str, str]], on_miss: OnMiss, remedy: str
) -> None:
    """Tell the engine which chunks a prompt is about to hold, and begin to read their caches.

    chunks: what each is called in messages, and its body.
    on_miss: what to do for one without a cache: ``text`` (nothing), ``compute`` (cached now; what
        the store cannot take stays a miss) or ``error``.
    remedy: what makes a cache again, for the message.

    Raises:
        ChunkNotCached: a chunk has no cache and ``on_miss`` is ``error``.
        InvalidChunk: a body is longer than the context window and ``on_miss`` is ``compute``.
    """
    bodies = [body for _, body in chunks]
    if on_miss == "compute":
        # Together is faster than one by one, and nothing heavy is left for an event loop.
        engine.cache_missing(bodies)
    elif on_miss == "error":
        for name, body in chunks:
            if not engine.handle_of(body):
                raise not_cached(engine, name, body, remedy)
    engine.prefetch(bodies)
    engine.expect(bodies)


def not_cached(engine: Engine, name: str, body: str, remedy: str) -> ChunkNotCached:
    """The error for a chunk that has no cache and should have one."""
    return ChunkNotCached(
        f"{name} (chunk {engine.key_of(body)}, it begins {body[:40]!r}) is not cached; {remedy}, "
        "or use on_miss='text' or 'compute'"
    )

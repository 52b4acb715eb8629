"""What of a prompt's beginning an earlier prompt has left in memory, and what this one leaves.

Tokens before the first chunk depend on nothing that is reused, whichever the method: the chat
template's head, the system prompt, earlier turns. Where ``auto`` computes everything, it may be the
chunks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from samkv_integrations.engine.prefix_cache import NewPrefix, Prefix
from samkv_integrations.engine.request import Request
from samkv_integrations.eviction.base import DroppingEviction
from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Held:
    """The beginning of a prompt that is held.

    prefix: its entries, None if it is not held. n_whole, n_blended: how many of them the request
    may take if everything is computed, and how many if caches of chunks are used.
    """

    prefix: Prefix | None = None
    n_whole: int = 0
    n_blended: int = 0

    def of_pass(self, *, whole: bool) -> Prefix | None:
        """What one of the two takes; None for nothing."""
        length = self.n_whole if whole else self.n_blended
        return self.prefix.first(length) if self.prefix is not None and length else None


def held_of(request: Request, layout: Layout) -> Held:
    """What is held of a prompt."""
    if request.prefixes is None:
        return Held()
    prefix = request.prefixes.find(request.fingerprint.computed_by, layout.token_ids)
    if prefix is None:
        return Held()
    n_whole, n_blended = (
        min(prefix.n_tokens, _most(request, layout, whole=whole)) for whole in (True, False)
    )
    return Held(prefix=prefix, n_whole=n_whole, n_blended=n_blended)


def _most(request: Request, layout: Layout, *, whole: bool) -> int:
    """How many of a prompt's first tokens need not be computed, if they are held."""
    rule = request.rule(whole=whole)
    if rule is None and _holds_chunks(request, whole=whole):
        return layout.n_tokens
    most = first_chunk(request, layout)
    if isinstance(rule, DroppingEviction):
        most = min(most, _first_query(layout, rule.n_queries))
    return most


def _holds_chunks(request: Request, *, whole: bool) -> bool:
    """Whether entries of chunks may be held: full prefill's, if it is not what was asked for.

    Who asks for ``recompute`` wants what others are compared with.
    """
    return whole and request.method.whole_if_faster


def first_chunk(request: Request, layout: Layout) -> int:
    """Where a prompt's first chunk begins, with or without a cache; its length without any."""
    chunks = request.resolved.chunks
    return chunks[0].runs[0].position if chunks else layout.n_tokens


def _first_query(layout: Layout, n_queries: int | None) -> int:
    """The first position whose query an eviction may look with.

    Uncached tokens always stay, so the last so many of them reach back at least as far as the last
    so many entries do.
    """
    if n_queries is None:
        return 0
    uncached = layout.uncached.nonzero()[:, 0]
    if n_queries == 0:
        return layout.n_tokens
    return int(uncached[-n_queries]) if n_queries <= len(uncached) else 0


@contextmanager
def leaving(
    request: Request, layout: Layout, held: Held, *, whole: bool
) -> Iterator[NewPrefix | None]:
    """What a pass in the block is to leave for the next prompt; None for no more than is held.

    Where ``auto`` computes everything, all up to the end of the last chunk is left: the same
    documents may be asked about again, whatever the question. Any other pass leaves what stands
    before the first one.
    """
    prefixes, chunks = request.prefixes, request.resolved.chunks
    if prefixes is None:
        yield None
        return
    last = first_chunk(request, layout)
    if chunks and _holds_chunks(request, whole=whole):
        last = chunks[-1].runs[-1].span.stop
    n_held = 0 if held.prefix is None else held.prefix.n_tokens
    new = prefixes.begin(
        request.fingerprint.computed_by, layout.token_ids[:last], n_held,
        request.model.token_kv_bytes,
    )  # fmt: skip
    yield new
    if new is not None:
        prefixes.keep(new)

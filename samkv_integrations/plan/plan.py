"""The plan of a prompt: what is computed, loaded, taken from memory, and kept.

`make_plan` reads a request and changes nothing. `samkv_integrations.serving.first_token` carries
the plan out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import PromptTooLong
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import SelectAll
from samkv_integrations.methods.baselines import RecomputeAll, RecomputeInexact
from samkv_integrations.methods.costs import MARGIN, is_whole
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.plan.kept_sequences import LEAST, KeptSequence, Match
from samkv_integrations.plan.request import Request
from samkv_integrations.prompt.layout import ChunkPart, Layout
from samkv_integrations.runtimes.base import Caches, FirstEntries, Held, PromptPass
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import ChunkBlocks

Source = KeptSequence[FirstEntries]
"""A sequence in memory that a prompt goes on from."""

Missed = Mapping[tuple[int, ...], str]
"""Token ids -> text of chunks without a usable cache."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """The sequence that a pass leaves in memory, see `KeptSequence` for the first three.

    is_complete: whether the entries of all tokens at all layers are there after the pass.
    """

    n_exact: int
    prompts: tuple[range, ...]
    turns: tuple[int, ...]
    is_complete: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a prompt is computed.

    missed: chunks to compute as chunks first; then make the plan again.
    work: for the runtime. source: the kept sequence that it goes on from.
    is_full: whether all tokens after the cached prefix are computed, as in full prefill.
    remains: the sequence that the pass leaves.
    """

    missed: Missed
    work: PromptPass
    source: Source | None
    is_full: bool
    remains: Remains


def make_plan(request: Request, found: Match[FirstEntries], *, may_compute: bool = True) -> Plan:
    """Decide, for each token, whether to compute it, load it, or take it from a kept sequence.

    A follow-up goes on from the kept sequence of its conversation, chunks and answers included, and
    blends the chunks after that. Any other prompt blends its chunks after exact entries of its
    first tokens, and full prefill goes on from exact entries alone. Whether the prompt is blended
    does not depend on what others have asked.

    found: the cached prefix; the caches of the chunks after it are open, see `Request.look_up`.
    may_compute: whether missed chunks may be computed as chunks. ``auto`` leaves them to full
        prefill where that is faster, ``recompute`` always.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method or the eviction cannot be used with the model.
    """
    _check_length(request)
    method, eviction, n_held = request.how.method, request.how.eviction, request.n_held
    request.model.check(method, eviction)
    layout, caches, missed = _chunks_behind(request, n_held)
    is_follow_up = found.is_follow_up and n_held == found.n_tokens
    # to the end of the previous question: how much more is in memory may depend on others
    n_counted = found.sequence.n_asked_in(n_held) if is_follow_up and found.sequence else 0
    if not may_compute or not _saves_time(request, layout, missed, n_counted):
        missed = {}

    is_full = is_whole(method, request.how.costs, layout, n_counted)
    is_exact = is_full or not method.recompute.uses_caches
    if is_full:
        method, eviction = _full_prefill(request), request.how.whole_eviction
        if not is_follow_up:
            found, first_chunk = request.beginning(is_exact=True), request.resolved.first_chunk
            n_held = found.n_tokens if eviction is None else min(found.n_tokens, first_chunk)
            if n_held > first_chunk:
                layout, caches = Layout(request.resolved.token_ids, (), ()), []
    n_held = _before_queries(n_held, layout, eviction)

    again = np.empty(0, np.int64)
    if is_follow_up and found.sequence is not None:
        again = _recomputed_in_prefix(request, found.sequence, n_held)
    is_complete = eviction is None and method.select.keeps_all and method.attend is None
    remains = _remains(
        request, layout, found.sequence, n_held, again, is_exact=is_exact, is_complete=is_complete
    )
    source = found.sequence if n_held else None
    keeps, n_copied = request.keeps and is_complete, 0
    if request.keeps and not keeps:
        n_copied = min(remains.n_exact, request.resolved.first_chunk)
    work = PromptPass(
        layout=layout, method=method, eviction=eviction, capacity=request.how.capacity,
        of_chunks=request.resolved.chunk_of_token >= 0,
        held=Held(
            entries=None if source is None else source.entries, n_tokens=n_held, again=again,
            n_exact=remains.n_exact,
        ),
        keeps=keeps, n_copied=n_copied if n_copied >= n_held + LEAST else 0,
        caches=Caches(
            fingerprint=request.chunks.fingerprint, opened=caches, reader=request.chunks.reader,
            keys=request.chunks.first_keys,
        ),
    )  # fmt: skip
    return Plan(missed=missed, work=work, source=source, is_full=is_full, remains=remains)


def _check_length(request: Request) -> None:
    n_tokens = len(request.resolved.token_ids)
    window = request.how.settings.window_within(request.model.context_window)
    if n_tokens + request.how.capacity > window:
        raise PromptTooLong(
            f"prompt of {n_tokens} tokens (chunks at full size) and {request.how.capacity} new "
            f"tokens exceed the context window of {window} of {request.model.name!r}; retrieve "
            "fewer chunks, shorten the history, or ask for fewer tokens"
            f"{request.model.wider_window}"
        )


def _chunks_behind(request: Request, n_held: int) -> tuple[Layout, list[StoredChunk], Missed]:
    """The layout of the chunks after the cached prefix, their caches, and chunks without one."""
    parts, caches = list[ChunkPart](), list[StoredChunk]()
    missed: dict[tuple[int, ...], str] = {}
    n_tokens = len(request.resolved.token_ids)
    for chunk in request.resolved.chunks:
        blocks = None if chunk.stored is None else chunk.stored.blocks
        part = ChunkPart(runs=chunk.runs, blocks=blocks).within(range(n_held, n_tokens))
        if part is None:
            continue
        parts.append(part)
        if chunk.stored is not None:
            caches.append(chunk.stored)
        elif chunk.text is not None:
            missed[chunk.token_ids] = chunk.text
    return Layout(request.resolved.token_ids, parts, request.chunks.prefix), caches, missed


def _saves_time(request: Request, layout: Layout, missed: Missed, n_held: int) -> bool:
    """Whether to compute missed chunks as chunks: not if full prefill is estimated to be faster."""
    method, costs = request.how.method, request.how.costs
    if request.resolved.on_miss != "compute" or not method.recompute.uses_caches:
        return False
    if costs is None or not missed:
        return True
    lengths = [len(ids) for ids in missed]  # whole chunks, of which the prompt may hold a part
    both_s = costs.chunks_s(lengths, len(request.chunks.prefix))
    both_s += costs.blended_s(method, layout, lengths, n_held)
    return both_s <= MARGIN * costs.full_prefill_s(layout.n_tokens, n_held)


def _full_prefill(request: Request) -> Method:
    """The request's method as full prefill: it recomputes all tokens that are not exact."""
    # quantised entries are never exact, wherever their chunk stands
    recompute = RecomputeAll() if request.chunks.rounds else RecomputeInexact()
    return replace(
        request.how.method, select=SelectAll(), recompute=recompute, update=None, eviction=None
    )


def _before_queries(n_tokens: int, layout: Layout, eviction: Eviction | None) -> int:
    """At most ``n_tokens``: the first tokens whose queries an eviction does not need.

    Uncached tokens always stay, so the last n of them reach back at least as far as the last n
    entries.
    """
    n_queries = 0 if eviction is None else eviction.n_queries
    if n_queries == 0:
        return n_tokens
    uncached = layout.uncached.nonzero()[0]
    if n_queries is None or n_queries > len(uncached):
        return 0
    return min(n_tokens, int(uncached[-n_queries]))


def _recomputed_in_prefix(request: Request, source: Source, n_held: int) -> NDArray[np.int64]:
    """Positions in the cached prefix that a follow-up recomputes, ascending."""
    resolved, scheme = request.resolved, request.chunks.fingerprint.scheme
    none = np.empty(0, np.int64)
    asked = range(source.turn_in(n_held, request.n_asked), request.n_asked)
    if not asked or not asked.start:
        return none
    parts = [
        ChunkPart(
            runs=chunk.runs, blocks=ChunkBlocks(n_tokens=len(chunk.token_ids), scheme=scheme)
        ).within(range(n_held))
        for chunk in resolved.chunks
    ]
    layout = Layout(
        resolved.token_ids, [part for part in parts if part], request.chunks.prefix, asked
    )
    given = ~source.from_cache[layout.context_positions]
    if not layout.n_context or given.all():
        return none
    return layout.context_positions[request.how.method.recompute.choose_again(layout, given)]


def _remains(
    request: Request, layout: Layout, source: Source | None, n_held: int,
    again: NDArray[np.int64], *, is_exact: bool, is_complete: bool,
) -> Remains:  # fmt: skip
    """The sequence that a pass leaves in memory.

    layout: with the chunks that are blended. source: its first ``n_held`` tokens are taken.
    is_exact: whether the pass computes what full prefill does, if it goes on from exact entries.
    """
    n_exact, prompts = 0, tuple[range, ...]()
    turns: tuple[int, ...] = (n_held,)
    if source is not None:
        n_exact, n_before = min(n_held, source.n_exact), source.n_prompts_in(n_held)
        prompts = source.prompts[:n_before]
        turns = (*source.turns[:n_before], source.turn_in(n_held, request.n_asked))
    if n_exact == n_held and is_exact:
        n_exact = layout.n_tokens
    elif n_exact == n_held and int(layout.context_positions[0]) >= n_held + LEAST:
        # a pass over fewer tokens may take faster products, which round
        n_exact = int(layout.context_positions[0])

    n_asked, n_before = request.n_asked, max(n_held, prompts[-1].stop if prompts else 0)
    begins = (
        max(n_before, run.position)
        for chunk in request.resolved.chunks for run in chunk.runs if n_before < run.span.stop
    )  # fmt: skip
    own = range(min(next(begins, n_asked), n_asked), n_asked)
    if len(again):  # all new entries depend on the tokens that were recomputed for this question
        own = range(min(turns[-1], own.start), own.stop)
    return Remains(n_exact=n_exact, prompts=(*prompts, own), turns=turns, is_complete=is_complete)

"""From a request to its first token: plan, load and run, keep, describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import OutOfMemory
from samkv_integrations.plan.describe import describe
from samkv_integrations.plan.kept_sequences import KeptSequence
from samkv_integrations.plan.plan import Plan, make_plan
from samkv_integrations.plan.request import Request
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.report import Report
from samkv_integrations.runtimes.base import (
    Begun,
    ChunkLost,
    FirstEntries,
    Logits,
    Observer,
    TokenSequence,
)


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """The result of the prompt's pass.

    logits: of the first token. sequence: for the tokens after it. layout: of the prompt.
    report: figures that later stages add, such as ``ttft_s``, are still 0. kept: the prompt's
    entries in memory, which those of the answer may follow; None if they cannot.
    """

    logits: Logits
    sequence: TokenSequence
    report: Report
    layout: Layout
    kept: KeptSequence[FirstEntries] | None = None


def first_token(request: Request, observer: Observer) -> FirstToken:
    """The first token of an answer. To be called in the model's thread.

    A cache that fails while it is read becomes a miss, and the request starts again without it. A
    device that runs out of memory frees hot chunks and kept sequences, and the request starts once
    more.

    Raises:
        OutOfMemory: the device has no memory for it without them either.
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method cannot be used with the model, or chooses with a wrong shape.
        ChunkNotCached: a cache failed, and ``on_miss`` is ``error``.
    """
    is_last = False
    while True:
        try:
            return _first_token(request, observer)
        except ChunkLost as lost:
            request.resolved.lose(lost.chunk, lost.miss)
        except OutOfMemory:
            request.free_memory()
            if is_last:
                raise
            is_last = True  # the next try begins when the tensors of this one are free


def _first_token(request: Request, observer: Observer) -> FirstToken:
    found = request.look_up()
    plan = make_plan(request, found)
    if plan.missed:
        with observer.stage("compute_chunks"):
            resolved = request.resolved
            made = request.chunks.compute_for(plan.missed, resolved.since, observer.pause)
            resolved.add_computed(made)
        plan = make_plan(request, request.look_up(), may_compute=False)
    begun = request.model.begin(plan.work, observer)
    try:
        kept = _keep(request, plan, begun)
        report = replace(describe(request, plan, begun), stays=kept is not None)
    except BaseException:
        begun.sequence.close()
        raise
    return FirstToken(
        logits=begun.logits, sequence=begun.sequence, report=report, layout=plan.work.layout,
        kept=kept,
    )  # fmt: skip


def _keep(request: Request, plan: Plan, begun: Begun) -> KeptSequence[FirstEntries] | None:
    """Keep the prompt's entries for later prompts; None if they are not there, or have no room.

    Where some were computed again for this answer, the prompt is kept with the answer, at its end.
    """
    work, remains, n_copied = plan.work, plan.remains, plan.work.n_copied
    kept = partial(
        KeptSequence[FirstEntries], made_by=work.caches.fingerprint.computed_by, way=request.way,
        deletion=request.resolved.since,
    )  # fmt: skip
    if begun.copied is not None:  # exact entries of the first tokens, before any chunk
        beginning = kept(
            token_ids=request.token_ids[:n_copied], n_exact=n_copied,
            from_cache=np.zeros(n_copied, np.bool_), prompts=(), turns=(),
            entries=begun.copied, n_bytes=begun.copied.n_bytes,
        )  # fmt: skip
        request.keep(beginning)
    if (entries := begun.sequence.entries) is None:
        return None
    whole = kept(
        token_ids=request.token_ids, n_exact=remains.n_exact,
        from_cache=_from_cache(plan, begun), prompts=remains.prompts, turns=remains.turns,
        entries=entries, n_bytes=entries.n_bytes,
    )  # fmt: skip
    return whole if len(work.held.again) or request.keep(whole) else None


def _from_cache(plan: Plan, begun: Begun) -> NDArray[np.bool_]:
    """(T,) tokens whose entries came from a chunk cache, and may be computed again later."""
    layout, n_held = plan.work.layout, plan.work.held.n_tokens
    from_cache = np.zeros(layout.n_tokens, np.bool_)
    if plan.source is not None:
        from_cache[:n_held] = plan.source.from_cache[:n_held]
    # exact ones are not computed again for a later question either
    is_given = (begun.computed == 1) | layout.exact[layout.chunk_of_token]
    from_cache[layout.context_positions] = ~is_given
    return from_cache

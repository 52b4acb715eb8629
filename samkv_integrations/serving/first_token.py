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
    EntriesLost,
    FirstEntries,
    Logits,
    Observer,
    TokenSequence,
)


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """The result of the prompt's pass.

    logits: of the first token. sequence: for the tokens after it. layout: of the prompt.
    report: figures that later stages add, such as ``ttft_s``, are still 0. kept: the sequence
    of the prompt, which is kept with the answer at its end; None if it is not.
    """

    logits: Logits
    sequence: TokenSequence
    report: Report
    layout: Layout
    kept: KeptSequence[FirstEntries] | None = None


def first_token(request: Request, observer: Observer) -> FirstToken:
    """Compute a prompt's pass, for the first token. To be called in the model's thread.

    If a cache fails while it is read, it becomes a miss, and the request starts again without it;
    likewise if kept entries are gone that it was to go on from.
    If the device runs out of memory, hot chunks and kept sequences are freed, and the request
    starts once more.

    Raises:
        OutOfMemory: even without these the device has no memory for it.
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
        except EntriesLost:
            continue
        except OutOfMemory:
            request.free_memory()
            if is_last:
                raise
            is_last = True  # outside `except`, which would hold this try's tensors


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
    """Keep the prompt's entries for later prompts; None if some are missing, or there is no room.

    If some were recomputed for this answer, they are kept only with the answer, at its end.
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
    """(T,) bool, tokens whose entries came from a chunk cache; a follow-up may recompute them."""
    layout, n_held = plan.work.layout, plan.work.held.n_tokens
    from_cache = np.zeros(layout.n_tokens, np.bool_)
    if plan.source is not None:
        from_cache[:n_held] = plan.source.from_cache[:n_held]
    # a later question does not recompute exact ones either
    is_given = (begun.computed == 1) | layout.exact[layout.chunk_of_token]
    from_cache[layout.context_positions] = ~is_given
    return from_cache

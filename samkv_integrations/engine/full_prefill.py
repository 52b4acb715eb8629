"""When a context is computed as a whole, and going on from what that left in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.engine.accounting import ChunkWork, Stopwatch, report_of
from samkv_integrations.engine.blend import Blend
from samkv_integrations.engine.costs import MARGIN, CostModel
from samkv_integrations.engine.dense_cache import DenseCache
from samkv_integrations.engine.plan import plan_pass
from samkv_integrations.engine.prefix_cache import Prefix
from samkv_integrations.engine.request import FirstToken, Request
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import overwrite
from samkv_integrations.methods.parts import RecomputeAll, RecomputeInexact, SelectAll
from samkv_integrations.prompt.layout import Layout, Segment
from samkv_integrations.prompt.resolve import Resolved


def is_whole(
    method: Method, costs: CostModel | None, layout: Layout, missed: Sequence[int] = ()
) -> bool:
    """Whether a method computes the context as a whole, which is full prefill.

    missed: tokens of each uncached chunk that counts as a cached one.
    """
    if layout.n_context + sum(missed) <= method.recompute.whole_tokens:
        return True
    if not method.whole_if_faster:
        return False
    assert costs is not None
    two_passes = two_passes_s(method, costs, layout, missed)
    return two_passes > MARGIN * costs.full_prefill_s(layout.n_tokens)


def two_passes_s(
    method: Method, costs: CostModel, layout: Layout, missed: Sequence[int] = ()
) -> float:
    """A layer's share of a request that is not computed as a whole; ``missed`` as in `is_whole`."""
    n_context, n_chunks = layout.n_context + sum(missed), layout.n_chunks + len(missed)
    n_probed = int(method.select.probe_tokens(layout).sum())
    ratio = method.recompute.most_ratio(n_context, n_chunks)
    return costs.two_passes_s(layout.n_tokens, n_context, n_probed, ratio)


def as_full_prefill(request: Request) -> Method:
    """The request's method with the whole context computed."""
    # entries of few bits are never exact, wherever their chunk stands
    is_rounded = request.fingerprint.entry_format.is_quantised
    everything = RecomputeAll() if is_rounded else RecomputeInexact()
    return replace(
        request.method, select=SelectAll(), recompute=everything, update=overwrite, eviction=None
    )


def held_prefix(request: Request, layout: Layout, missed: Sequence[int] = ()) -> Prefix | None:
    """KV entries of an earlier prompt that began so, where going on from there is the fastest way.

    Not where an eviction is asked for: it goes by the queries of the whole prompt.

    missed: tokens of the uncached chunks that would be computed as chunks.
    """
    method, costs = request.method, request.costs
    if not method.whole_if_faster or request.prefixes is None or request.eviction:
        return None
    prefix = request.prefixes.find(request.fingerprint.computed_by, layout.token_ids.tolist())
    if prefix is None or is_whole(method, costs, layout, missed):
        return prefix
    assert costs is not None
    going_on = costs.after_prefix_s(layout.n_tokens, len(prefix.token_ids))
    otherwise = costs.chunks_s(missed) + two_passes_s(method, costs, layout, missed)
    return prefix if going_on <= otherwise else None


def after_prefix(request: Request, layout: Layout, prefix: Prefix, clock: Stopwatch) -> FirstToken:
    """Go on from KV entries that full prefill left a moment ago; exact."""
    model, length = request.model, len(prefix.token_ids)
    ids = layout.token_ids.tolist()
    held = Segment(token_ids=tuple(ids[:length]), blocks=BlockScheme().of(length))
    of_rest = Layout.of([held, Segment(token_ids=tuple(ids[length:]))], ())
    cos, sin = model.cos_sin(torch.arange(len(ids)))
    cache = DenseCache(model.n_layers, request.capacity)
    keep = torch.ones(model.n_layers, of_rest.n_blocks, dtype=torch.bool)
    nothing = torch.zeros(model.n_layers, length, dtype=torch.bool)
    with clock("blend"):
        blend = Blend(
            model=model, layout=of_rest, context=prefix, cos=cos, sin=sin, cache=cache,
        )  # fmt: skip
        plan = plan_pass(of_rest, keep, nothing, device=model.device, dtype=model.dtype)
        logits = blend.run(plan)
    keep_prefix(request, layout, cache, beyond=length)
    report = report_of(
        request, layout, cache, clock, ran="prefix", eviction=None,
        work=_work_behind(length, request.resolved),
        n_read=request.resolved.bytes_read, prefix_tokens=length,
    )  # fmt: skip
    return FirstToken(logits=logits, cache=cache, layout=layout, report=report)


def _work_behind(length: int, resolved: Resolved) -> ChunkWork:
    """What becomes of a prompt's chunks whose first ``length`` tokens are held in memory."""
    chunks = [segment for segment in resolved.segments if segment.is_context]
    kept = computed = reused = 0
    for span, chunk in zip(resolved.context_spans, chunks, strict=True):
        kept += len(span)
        computed += len(span) if chunk.computed_now else max(0, span.stop - max(span.start, length))
        reused += span.start < length and not chunk.computed_now
    return ChunkWork(kept=kept, computed=computed, reused=reused)


def keep_prefix(request: Request, layout: Layout, cache: WorkingCache, beyond: int = 0) -> None:
    """Remember what full prefill computed, up to the end of the last chunk if that lies beyond."""
    end = max((span.stop for span in request.resolved.context_spans), default=0)
    if request.prefixes is None or not isinstance(cache, DenseCache):
        return
    if cache.room and beyond < end < layout.n_tokens:
        ids, made_by = layout.token_ids[:end].tolist(), request.fingerprint.computed_by
        request.prefixes.keep(made_by, ids, cache.keys, cache.values)

"""The query path of one prompt, from its segments to the logits of the answer's first token."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.engine.blend import Blend
from samkv_integrations.engine.costs import MARGIN, CostModel
from samkv_integrations.engine.dense_cache import DenseCache
from samkv_integrations.engine.evictor import Evictor
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.engine.plan import PassPlan, plan_pass
from samkv_integrations.engine.prefix_cache import Prefix, PrefixCache
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.sparse_cache import SparseCache
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.errors import PromptTooLong
from samkv_integrations.eviction import Eviction, Quest
from samkv_integrations.eviction.base import DroppingEviction
from samkv_integrations.methods.base import Checked, Method, ProbedLayer, overwrite
from samkv_integrations.methods.parts import RecomputeAll, RecomputeInexact, SelectAll
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout, Segment
from samkv_integrations.prompt.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """What an answer begins with.

    logits: (vocabulary,) of its first token. cache: what its later tokens go on with. report: the
    figures so far, ``ttft_s`` and those of decoding left at 0.
    """

    logits: Tensor
    cache: WorkingCache
    layout: Layout
    report: Report


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    resolved: the prompt's segments, and the open caches of its chunks. prefix: what chunks were
    prefilled after. stable_layers: N*, for methods that need statistics. capacity: most tokens of
    the answer. context_window: most of prompt and answer, if fewer than the model's. own_eviction:
    take the method's eviction in place of ``eviction``. costs, prefixes: for a method that computes
    everything where that is faster.
    """

    model: Model
    method: Method
    resolved: Resolved
    fingerprint: Fingerprint
    prefix: tuple[int, ...]
    capacity: int
    stable_layers: tuple[int, ...] = ()
    eviction: Eviction | None = None
    own_eviction: bool = False
    context_window: int | None = None
    costs: CostModel | None = None
    prefixes: PrefixCache | None = None


def first_token(request: Request) -> FirstToken:
    """Lay out, probe, select, load and blend. Nothing computed here is ever written to the store.

    A cache that turns out broken on the way becomes a chunk computed from its tokens, and the way
    begins again.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
    """
    clock = Stopwatch()
    resolved = request.resolved
    while True:
        layout = check_length(request)
        try:
            return _answer(request, layout, clock)
        except ChunkLost as lost:
            clock.bytes_lost += resolved.opened[lost.index].bytes_read
            resolved.lose(lost.index, lost.miss)


def _answer(request: Request, layout: Layout, clock: Stopwatch) -> FirstToken:
    model, method = request.model, request.method
    if (prefix := held_prefix(request, layout)) is not None:
        return _after_prefix(request, layout, prefix, clock)
    if is_whole(method, request.costs, layout):
        # entries of few bits are never exact, wherever their chunk stands
        is_rounded = request.fingerprint.entry_format.is_quantised
        everything = RecomputeAll() if is_rounded else RecomputeInexact()
        method = replace(
            method, select=SelectAll(), recompute=everything, update=overwrite, eviction=None
        )
    cos, sin = model.cos_sin(torch.arange(layout.n_tokens))
    cached_at = cached_positions(method, layout).to(model.device)
    context = Context(
        layout, request.resolved.opened, request.fingerprint,
        cos[cached_at].float(), sin[cached_at].float(),
    )  # fmt: skip
    blend = Blend(
        model=model, layout=layout, context=context, cos=cos, sin=sin, update=method.update,
        weigh=method.attend,
    )  # fmt: skip
    with clock("load"):
        inputs = context.inputs(method.needs, request.stable_layers)
    scores = None
    if method.select.probes:
        probe = _probe_plan(model, method, layout)
        with clock("load"):
            context.load(probe.blocks)
        with clock("probe"):
            scores = _probe(blend, method, probe)
    with clock("select"):
        selection = method.select.choose(scores, inputs, layout)
        recompute = method.recompute.choose(selection, inputs, layout)
        plan = _plan(model, method, layout, selection.keep, recompute)
    check = method.recompute.check_layer
    with clock("load"):  # what a check leaves out is not known yet
        context.load(plan.blocks if check is None else selection.keep)
    cache = _working_cache(request, method, layout, context)
    plans = [plan]

    def decide(checked: Checked) -> PassPlan:
        assert check is not None
        later = recompute.clone()
        later[check + 1 :] = method.recompute.choose_after(checked, layout)
        plans.append(_plan(model, method, layout, selection.keep, later))
        return plans[-1]

    with clock("blend"):
        checks = None if check is None else (check, decide)
        logits = replace(blend, cache=cache, check=checks).run(plan)
    if method is not request.method and method.whole_if_faster:
        _keep_prefix(request, layout, cache)
    kept = plan.kept[:, layout.block_of_token].sum(1)
    report = _report(
        request, layout, cache, clock, ran=_ran(request, method),
        eviction=_eviction(request, method), kept=kept, computed=plans[-1].computed.sum(1),
        n_read=context.bytes_read,
    )  # fmt: skip
    return FirstToken(logits=logits, cache=cache, layout=layout, report=report)


def held_prefix(request: Request, layout: Layout, missed: Sequence[int] = ()) -> Prefix | None:
    """KV entries of an earlier prompt that began so, where going on from there is the fastest way.

    Not where an eviction is asked for: it goes by the queries of the whole prompt.

    missed: tokens of the uncached chunks that would be computed as chunks.
    """
    method, costs = request.method, request.costs
    if not method.whole_if_faster or request.prefixes is None or request.eviction:
        return None
    prefix = request.prefixes.find(layout.token_ids.tolist())
    if prefix is None or is_whole(method, costs, layout, missed):
        return prefix
    assert costs is not None
    going_on = costs.after_prefix_s(layout.n_tokens, len(prefix.token_ids))
    otherwise = costs.chunks_s(missed) + two_passes_s(method, costs, layout, missed)
    return prefix if going_on <= otherwise else None


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


def _after_prefix(request: Request, layout: Layout, prefix: Prefix, clock: Stopwatch) -> FirstToken:
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
    _keep_prefix(request, layout, cache, beyond=length)
    everything = torch.full((model.n_layers,), layout.n_context)
    spans = request.resolved.context_spans
    behind = sum(max(0, span.stop - max(span.start, length)) for span in spans)
    report = _report(
        request, layout, cache, clock, ran="prefix", eviction=None, kept=everything,
        computed=torch.full_like(everything, behind),
        n_read=sum(chunk.bytes_read for chunk in request.resolved.opened), prefix_tokens=length,
    )  # fmt: skip
    return FirstToken(logits=logits, cache=cache, layout=layout, report=report)


def _keep_prefix(request: Request, layout: Layout, cache: WorkingCache, beyond: int = 0) -> None:
    """Remember what full prefill computed, up to the end of the last chunk if that lies beyond."""
    end = max((span.stop for span in request.resolved.context_spans), default=0)
    if request.prefixes is None or not isinstance(cache, DenseCache):
        return
    if cache.room and beyond < end < layout.n_tokens:
        request.prefixes.keep(layout.token_ids[:end].tolist(), cache.keys, cache.values)


def _ran(request: Request, method: Method) -> str:
    """What a request came to: the method's own way, or full prefill."""
    if method is not request.method:
        return "recompute"
    return "samkv-guided" if method.whole_if_faster else method.name


def cached_positions(method: Method, layout: Layout) -> Tensor:
    """(Tctx,) the positions at which a method attends to stored keys."""
    is_global = method.positions == "global"
    return layout.context_positions if is_global else layout.prefilled_positions


def _plan(
    model: Model, method: Method, layout: Layout, keep: Tensor, recompute: Tensor
) -> PassPlan:
    return plan_pass(
        layout, keep, recompute, device=model.device, dtype=model.dtype,
        mixes=method.update is not overwrite, weighs=method.attend is not None,
    )  # fmt: skip


def _probe_plan(model: Model, method: Method, layout: Layout) -> PassPlan:
    blocks = method.select.probe_blocks(layout).expand(model.n_layers, -1)
    nothing = torch.zeros(model.n_layers, layout.n_context, dtype=torch.bool)
    uncached = method.select.probe_tokens(layout)
    return plan_pass(
        layout, blocks, nothing, device=model.device, dtype=model.dtype, uncached=uncached,
        weighs=method.attend is not None,
    )  # fmt: skip


def _probe(blend: Blend, method: Method, plan: PassPlan) -> Tensor:
    """What the method's selection makes of every layer, stacked."""
    scores: list[Tensor] = []

    def observe(probed: ProbedLayer) -> None:
        score = method.select.score(probed, blend.layout)
        if score is not None:
            scores.append(score)

    replace(blend, observe=observe).through_layers(plan)
    return torch.stack(scores)


def _eviction(request: Request, method: Method) -> Eviction | None:
    return method.eviction if request.own_eviction else request.eviction


def _working_cache(
    request: Request, method: Method, layout: Layout, context: Context
) -> WorkingCache:
    rule, n_layers = _eviction(request, method), request.model.n_layers
    if isinstance(rule, Quest):
        budget = rule.budget(layout.n_context)
        return SparseCache(n_layers, context, budget, request.capacity, method.attend)
    evictor = None
    if isinstance(rule, DroppingEviction):
        evictor = Evictor(
            rule, n_tokens=layout.n_tokens, n_layers=n_layers, capacity=request.capacity
        )
    return DenseCache(n_layers, request.capacity, evictor=evictor, weigh=method.attend)


def check_length(request: Request) -> Layout:
    """The layout of a request. Raises PromptTooLong as `first_token` does."""
    model, layout = request.model, Layout.of(request.resolved.segments, request.prefix)
    window = min(request.context_window or sys.maxsize, model.context_window)
    if layout.n_tokens + request.capacity > window:
        raise PromptTooLong(
            f"prompt of {layout.n_tokens} tokens (chunks at full size) and {request.capacity} new "
            f"tokens exceed the context window of {window} of {model.name!r}; retrieve fewer "
            "chunks or ask for fewer tokens"
        )
    return layout


class Stopwatch:
    """Seconds spent in each stage of a request, which do not overlap.

    On a GPU a stage counts until its work is launched; the first one that waits for the device
    counts what came before.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes_lost = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began


def _report(
    request: Request,
    layout: Layout,
    cache: WorkingCache,
    clock: Stopwatch,
    *,
    ran: str,
    eviction: Eviction | None,
    kept: Tensor,
    computed: Tensor,
    n_read: int,
    prefix_tokens: int = 0,
) -> Report:
    """The figures so far. kept, computed: (L,) context tokens kept and computed at each layer."""
    model, spent, resolved = request.model, clock.seconds, request.resolved
    n_context = layout.n_context + layout.n_missed
    n_kept = sum(map(cache.attended, kept.tolist())) / model.n_layers + layout.n_missed
    n_new = sum(resolved.computed)
    n_missed = 0 if prefix_tokens else layout.n_missed  # ``computed`` has those behind it
    n_computed = int(computed.sum()) / model.n_layers + n_missed + n_new
    entry_bytes = 2 * model.n_kv_heads * model.head_dim * model.dtype.itemsize
    return Report(
        method=request.method.name,
        ran=ran,
        eviction=None if eviction is None else eviction.name,
        model=model.name,
        prompt_tokens=layout.n_tokens,
        context_tokens=n_context,
        prefix_tokens=prefix_tokens,
        kept_ratio=n_kept / n_context if n_context else 1.0,
        recompute_ratio=min(1.0, n_computed / n_context) if n_context else 0.0,
        uncached_tokens=layout.n_tokens - n_context,
        chunk_hits=layout.n_chunks - len(resolved.computed),
        chunk_misses=dict(resolved.misses),
        chunks_computed=len(resolved.computed),
        bytes_read=clock.bytes_lost + n_read,
        kv_bytes=cache.prompt_bytes,
        full_kv_bytes=model.n_layers * layout.n_tokens * entry_bytes,
        decode_kv_bytes=cache.kv_bytes,
        probe_s=spent["probe"],
        select_s=spent["select"],
        load_s=spent["load"],
        blend_s=spent["blend"],
        ttft_s=0.0,
        completion_tokens=0,
        decode_tokens_per_s=0.0,
    )

"""The query path of one prompt, from its segments to the logits of the answer's first token."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from samkv_integrations.engine.accounting import ChunkWork, Stopwatch, report_of
from samkv_integrations.engine.blend import Blend
from samkv_integrations.engine.dense_cache import DenseCache
from samkv_integrations.engine.evictor import Evictor
from samkv_integrations.engine.full_prefill import (
    after_prefix,
    as_full_prefill,
    held_prefix,
    is_whole,
    keep_prefix,
)
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.engine.missed import with_missed
from samkv_integrations.engine.plan import PassPlan, plan_pass
from samkv_integrations.engine.request import FirstToken, Request, check_length
from samkv_integrations.engine.sparse_cache import SparseCache
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.eviction import Eviction, Quest
from samkv_integrations.eviction.base import DroppingEviction
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import Checked, ProbedLayer, overwrite
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout


def first_token(request: Request) -> FirstToken:
    """Lay out, probe, select, load and blend. Nothing that depends on the prompt is ever stored.

    A cache that turns out broken on the way is a missed chunk, as if it had not been there, and the
    way begins again.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
    """
    clock = Stopwatch()
    resolved = request.resolved
    while True:
        request = with_missed(request)
        layout = check_length(request)
        try:
            return _answer(request, layout, clock)
        except ChunkLost as lost:
            clock.bytes_lost += resolved.opened[lost.index].bytes_read
            resolved.lose(lost.index, lost.miss)


def _answer(request: Request, layout: Layout, clock: Stopwatch) -> FirstToken:
    if (prefix := held_prefix(request, layout)) is not None:
        return after_prefix(request, layout, prefix, clock)
    model, whole = request.model, is_whole(request.method, request.costs, layout)
    method = as_full_prefill(request) if whole else request.method
    context, blend = _begin(request, method, layout)
    with clock("load"):
        inputs = context.inputs(method.needs, request.stable_layers)
    scores = _probe(blend, context, method, clock) if method.select.probes else None
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
    if whole and method.whole_if_faster:
        keep_prefix(request, layout, cache)
    report = report_of(
        request, layout, cache, clock, ran="recompute" if whole else method.way,
        eviction=_eviction(request, method), n_read=context.bytes_read,
        work=ChunkWork.of_pass(request, layout, cache, plans[-1]),
    )  # fmt: skip
    return FirstToken(logits=logits, cache=cache, layout=layout, report=report)


def _begin(request: Request, method: Method, layout: Layout) -> tuple[Context, Blend]:
    """Nothing read and nothing computed yet."""
    model = request.model
    cos, sin = model.cos_sin(torch.arange(layout.n_tokens))
    # not out of those: after a prefix that the prompt has not, chunks may reach beyond its end
    cached_at = model.cos_sin(cached_positions(method, layout))
    context = Context(
        layout, request.resolved.opened, request.fingerprint,
        *(side.float() for side in cached_at),
    )  # fmt: skip
    blend = Blend(
        model=model, layout=layout, context=context, cos=cos, sin=sin, update=method.update,
        weigh=method.attend,
    )  # fmt: skip
    return context, blend


def _probe(blend: Blend, context: Context, method: Method, clock: Stopwatch) -> Tensor:
    """What the method's selection makes of every layer of a probe, stacked."""
    plan = _probe_plan(blend.model, method, blend.layout)
    scores: list[Tensor] = []

    def observe(probed: ProbedLayer) -> None:
        score = method.select.score(probed, blend.layout)
        if score is not None:
            scores.append(score)

    with clock("load"):
        context.load(plan.blocks)
    with clock("probe"):
        replace(blend, observe=observe).through_layers(plan)
        return torch.stack(scores)


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

"""The query path of one prompt, from its segments to the logits of the answer's first token."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from samkv_integrations.engine.accounting import ChunkWork, Stopwatch, report_of
from samkv_integrations.engine.blend import Blend
from samkv_integrations.engine.dense_cache import DenseCache
from samkv_integrations.engine.evictor import Evictor
from samkv_integrations.engine.full_prefill import as_full_prefill, is_whole
from samkv_integrations.engine.held import first_chunk, held_of, leaving
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.engine.missed import with_missed
from samkv_integrations.engine.plan import PassPlan, plan_pass
from samkv_integrations.engine.prefix_cache import Prefix
from samkv_integrations.engine.request import FirstToken, Request, check_length
from samkv_integrations.engine.sparse_cache import SparseCache
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.eviction import Eviction, Quest
from samkv_integrations.eviction.base import DroppingEviction
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import Checked, ProbedLayer, overwrite
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
        with clock("compute_chunks") if resolved.missed_texts else nullcontext():
            request = with_missed(request)
        layout = check_length(request)
        try:
            return _answer(request, layout, clock)
        except ChunkLost as lost:
            clock.bytes_lost += resolved.opened[lost.index].bytes_read
            resolved.lose(lost.index, lost.miss)


def _answer(request: Request, layout: Layout, clock: Stopwatch) -> FirstToken:
    in_memory = held_of(request, layout)
    whole = is_whole(request.method, request.costs, layout, held=in_memory)
    method, rule = as_full_prefill(request) if whole else request.method, request.rule(whole=whole)
    held = in_memory.of_pass(whole=whole)
    n_held = 0 if held is None else held.n_tokens
    if holds_chunks := n_held > first_chunk(request, layout):
        layout = layout.as_text()
    context, blend = _begin(request, method, layout, held)
    with clock("load"):
        inputs = context.inputs(method.needs, request.stable_layers)
    scores = _probe(blend, context, method, clock) if _probes(method, layout) else None
    with clock("select"):
        selection = method.select.choose(scores, inputs, layout)
        recompute = method.recompute.choose(selection, inputs, layout)
        plan = _plan(blend, method, selection.keep, recompute)
    check = method.recompute.check_layer
    with clock("load"):  # what a check leaves out is not known yet
        context.load(plan.blocks if check is None else selection.keep)
    cache = _working_cache(request, rule, method, layout, context)
    plans = [plan]

    def decide(checked: Checked) -> PassPlan:
        assert check is not None
        later = recompute.clone()
        later[check + 1 :] = method.recompute.choose_after(checked, layout)
        plans.append(_plan(blend, method, selection.keep, later))
        return plans[-1]

    with clock("blend"), leaving(request, layout, in_memory, whole=whole) as leaves:
        checks = None if check is None else (check, decide)
        watch = request.watch
        logits = replace(blend, cache=cache, check=checks, leaves=leaves, watch=watch).run(plan)
    if watch is not None:
        watch.see_plan(layout, selection, plans[-1])
    if holds_chunks:
        work = ChunkWork.behind(n_held, request.resolved)
    else:
        work = ChunkWork.of_pass(request, layout, cache, plans[-1])
    ran = ("prefix" if n_held else "recompute") if whole else method.way
    report = report_of(
        request, cache, clock, ran=ran, eviction=rule, work=work, prefix_tokens=n_held
    )
    return FirstToken(logits=logits, cache=cache, layout=layout, report=report, stages=clock.stages)


def _begin(
    request: Request, method: Method, layout: Layout, held: Prefix | None
) -> tuple[Context, Blend]:
    """Nothing read and nothing computed yet."""
    model = request.model
    cos, sin = model.cos_sin(torch.arange(layout.n_tokens))
    # not out of those: after a prefix that the prompt has not, chunks may reach beyond its end
    cached_at = model.cos_sin(cached_positions(method, layout))
    context = Context(
        layout, request.resolved.opened if layout.n_chunks else (), request.fingerprint,
        *(side.float() for side in cached_at),
    )  # fmt: skip
    blend = Blend(
        model=model, layout=layout, context=context, cos=cos, sin=sin, update=method.update,
        weigh=method.attend, held=held,
    )  # fmt: skip
    return context, blend


def _probes(method: Method, layout: Layout) -> bool:
    return method.select.probes and bool(method.select.probe_tokens(layout).any())


def _probe(blend: Blend, context: Context, method: Method, clock: Stopwatch) -> Tensor:
    """What the method's selection makes of every layer of a probe, stacked."""
    plan = _probe_plan(blend, method)
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


def _plan(blend: Blend, method: Method, keep: Tensor, recompute: Tensor) -> PassPlan:
    model = blend.model
    return plan_pass(
        blend.layout, keep, recompute, device=model.device, dtype=model.dtype,
        n_held=0 if blend.held is None else blend.held.n_tokens,
        mixes=method.update is not overwrite, weighs=method.attend is not None,
    )  # fmt: skip


def _probe_plan(blend: Blend, method: Method) -> PassPlan:
    model, layout = blend.model, blend.layout
    blocks = method.select.probe_blocks(layout).expand(model.n_layers, -1)
    nothing = torch.zeros(model.n_layers, layout.n_context, dtype=torch.bool)
    uncached = method.select.probe_tokens(layout)
    n_held = 0
    if blend.held is not None:
        # behind a token that the probe leaves out, the others are not what they were when held
        n_held = int(uncached[: blend.held.n_tokens].cumprod(0).sum())
    return plan_pass(
        layout, blocks, nothing, device=model.device, dtype=model.dtype, uncached=uncached,
        n_held=n_held, weighs=method.attend is not None,
    )  # fmt: skip


def _working_cache(
    request: Request, rule: Eviction | None, method: Method, layout: Layout, context: Context
) -> WorkingCache:
    n_layers = request.model.n_layers
    if isinstance(rule, Quest):
        budget = rule.budget(layout.n_context)
        return SparseCache(n_layers, context, budget, request.capacity, method.attend)
    evictor = None
    if isinstance(rule, DroppingEviction):
        evictor = Evictor(
            rule, n_tokens=layout.n_tokens, n_layers=n_layers, capacity=request.capacity
        )
    return DenseCache(n_layers, request.capacity, evictor=evictor, weigh=method.attend)

"""The query path of one prompt: choose what is computed, load the rest, select, blend."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from samkv_integrations.cache.base import StoredChunk
from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.engine.blend import Blend, PassPlan, plan_pass
from samkv_integrations.engine.costs import blended_s, is_whole
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.engine.prefix_cache import Prefix
from samkv_integrations.engine.report import Stopwatch, report_of
from samkv_integrations.engine.request import FirstToken, Request
from samkv_integrations.engine.working_cache import DenseCache, SparseCache, WorkingCache
from samkv_integrations.errors import InvalidOption, PromptTooLong
from samkv_integrations.eviction import Eviction, Quest
from samkv_integrations.eviction.base import DroppingEviction
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import Checked, ProbedLayer, Select, overwrite
from samkv_integrations.methods.parts import RecomputeAll, RecomputeInexact, SelectAll
from samkv_integrations.prompt.layout import ChunkPart, Layout


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a prompt is computed.

    missed: chunks to compute as chunks first, token ids -> text; then is chosen anew.
    whole: whether everything is computed. method: the request's, or full prefill.
    eviction: what the answer goes on with.
    layout: of the prompt, and of what of its chunks stands behind the tokens that are held. opened:
    the caches of these chunks.
    held: entries of the prompt's first tokens, taken from memory: n_held of the n_found there are.
    fingerprint: identity of what is computed now. n_left: first tokens whose entries will be full
        prefill's, and are left for the next prompt.
    """

    missed: Mapping[tuple[int, ...], str]
    whole: bool
    method: Method
    eviction: Eviction | None
    layout: Layout
    opened: Sequence[StoredChunk]
    held: Prefix | None
    n_held: int
    n_found: int
    fingerprint: Fingerprint
    n_left: int


def choose(request: Request, *, may_compute: bool = True) -> Choice:
    """What of a prompt is computed as a whole, loaded, computed as chunks, or taken from memory.

    Causal attention makes the entries of the tokens before the first cache that is used depend on
    nothing that is reused: the chat template's head, the system prompt, earlier turns, and chunks
    that were computed with the prompt. The longest beginning that memory holds of them is taken,
    the rest is blended. ``recompute`` takes no chunk from memory: others are compared with it.

    may_compute: whether missed chunks may be computed as chunks. ``auto`` leaves them to full
        prefill where that is faster, ``recompute`` always.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method cannot be used with the model.
    """
    model, method, costs, resolved = (
        request.model, request.method, request.costs, request.resolved,
    )  # fmt: skip
    fingerprint, chunks = request.chunks.fingerprint, resolved.chunks
    may_compute &= resolved.on_miss == "compute" and method.recompute.uses_caches
    parts: list[ChunkPart] = []
    missed: dict[tuple[int, ...], str] = {}
    for chunk in chunks:
        blocks = None if chunk.stored is None else chunk.stored.blocks
        parts.append(ChunkPart(runs=chunk.runs, blocks=blocks, is_exact=chunk.is_exact))
        if may_compute and blocks is None and chunk.text is not None:
            missed[chunk.token_ids] = chunk.text
    prefix_ids = request.chunks.prefix
    layout = Layout.of(resolved.token_ids, parts, prefix_ids)
    if method.attend is not None and not model.scores_plainly:
        raise InvalidOption(
            f"method {method.name!r} weighs attention scores in its own way, and {model.name!r} "
            "bounds them or has sinks; choose another method, such as 'auto'"
        )
    window = min(request.settings.context_window or sys.maxsize, model.context_window)
    if layout.n_tokens + request.capacity > window:
        raise PromptTooLong(
            f"prompt of {layout.n_tokens} tokens (chunks at full size) and {request.capacity} new "
            f"tokens exceed the context window of {window} of {model.name!r}; retrieve "
            "fewer chunks or ask for fewer tokens"
        )
    # what the answer goes on with: full prefill ignores the eviction that is the method's own
    rule = whole_rule = request.eviction
    if request.own_eviction:
        rule, whole_rule = method.eviction, None
    # first tokens that memory holds, and those that need not be computed, blended or as a whole
    first_chunk = chunks[0].runs[0].position if chunks else layout.n_tokens
    found = None
    if request.prefixes is not None:
        found = request.prefixes.find(fingerprint.computed_by, layout.token_ids)
    n_found = 0 if found is None else found.n_tokens
    # into chunks only where nothing is selected: what is held is attended to in any case
    reaches = method.recompute.uses_caches and method.select.keeps_all
    reaches &= method.attend is None and rule is None
    n_blended = n_found if reaches else min(n_found, first_chunk)
    n_blended = _before_queries(n_blended, layout, rule)
    n_whole = _before_queries(min(n_found, first_chunk), layout, whole_rule)
    if whole_rule is None and method.whole_if_faster:
        n_whole = n_found
    behind = [part.behind(n_blended) for part in parts]
    blended, opened = layout, resolved.opened
    if n_blended > first_chunk:
        blended = Layout.of(resolved.token_ids, [part for part in behind if part], prefix_ids)
        there = zip(chunks, behind, strict=True)
        opened = [chunk.stored for chunk, part in there if part and chunk.stored]
    if missed and costs is not None:
        lengths = [len(ids) for ids in missed]  # of all of a chunk, whatever the prompt holds
        full_s = costs.full_prefill_s(layout.n_tokens, n_whole)
        both_s = costs.chunks_s(lengths, len(prefix_ids)) + blended_s(
            method, costs, blended, lengths, n_blended
        )
        if both_s > full_s or is_whole(method, costs, layout, blended, lengths, n_whole, n_blended):
            missed = {}
    whole = is_whole(method, costs, layout, blended, (), n_whole, n_blended)
    if layout.n_chunks and not blended.n_chunks:  # memory holds all chunks: full prefill goes on
        whole, n_whole = True, n_blended
    if not whole:
        n_held, layout = n_blended, blended
        n_left = int(layout.context_positions[0]) if layout.n_context else first_chunk
    else:
        n_held, rule, n_left = n_whole, whole_rule, first_chunk
        if chunks and method.whole_if_faster:
            n_left = chunks[-1].runs[-1].span.stop
        # entries of few bits are never exact, wherever their chunk stands
        is_rounded = fingerprint.entry_format.is_quantised
        everything = RecomputeAll() if is_rounded else RecomputeInexact()
        method = replace(
            method, select=SelectAll(), recompute=everything, update=overwrite, eviction=None
        )
        if n_held > first_chunk:
            layout, opened = Layout.of(resolved.token_ids, (), ()), []
    return Choice(
        missed=missed, whole=whole, method=method, eviction=rule, layout=layout, opened=opened,
        held=found.first(n_held) if found is not None and n_held else None, n_held=n_held,
        n_found=n_found, fingerprint=fingerprint, n_left=n_left,
    )  # fmt: skip


def _before_queries(n_tokens: int, layout: Layout, rule: Eviction | None) -> int:
    """At most ``n_tokens``: the first tokens with whose queries an eviction does not look.

    Uncached tokens always stay, so the last so many of them reach back at least as far as the last
    so many entries do.
    """
    if not isinstance(rule, DroppingEviction) or rule.n_queries == 0:
        return n_tokens
    uncached = layout.uncached.nonzero()[:, 0]
    if rule.n_queries is None or rule.n_queries > len(uncached):
        return 0
    return min(n_tokens, int(uncached[-rule.n_queries]))


def first_token(request: Request) -> FirstToken:
    """The first token of an answer. Nothing that depends on the prompt is ever stored.

    A cache that turns out broken on the way is a missed chunk, as if it had not been there, and the
    way begins again.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
    """
    clock, resolved = Stopwatch(), request.resolved
    while True:
        choice = choose(request)
        if choice.missed:
            with clock("compute_chunks"):
                resolved.add_computed(
                    request.chunks.compute_for(choice.missed, began=request.began)
                )
                choice = choose(request, may_compute=False)
        try:
            return _compute(request, choice, clock)
        except ChunkLost as lost:
            cache = choice.opened[lost.index]
            clock.bytes_lost += cache.bytes_read
            resolved.lose(cache, lost.miss)


def _compute(request: Request, choice: Choice, clock: Stopwatch) -> FirstToken:
    model, layout, method = request.model, choice.layout, choice.method
    rotation = model.rotation(torch.arange(layout.n_tokens))
    is_global = method.positions == "global"
    cached_at = layout.context_positions if is_global else layout.prefilled_positions
    # not out of those above: chunks may reach beyond the end, after a prefix the prompt has not
    cached_rotation = model.rotation(cached_at)
    with Context(layout, choice.opened, choice.fingerprint, cached_rotation) as context:
        blend = Blend(
            model=model, layout=layout, context=context, rotation=rotation, update=method.update,
            weigh=method.attend, held=choice.held,
        )  # fmt: skip
        plan_of = partial(
            plan_pass, layout, devices=model.layer_devices, dtype=model.dtype, n_held=choice.n_held,
            mixes=method.update is not overwrite, weighs=method.attend is not None,
            windows=model.windows_within(layout.n_tokens),
        )  # fmt: skip
        with clock("load"):
            inputs = context.inputs(method.needs, request.stable_layers)
        scores = None
        if method.select.probes:
            nothing = torch.zeros(model.n_layers, layout.n_context, dtype=torch.bool)
            probed = method.select.probe_blocks(layout).expand(model.n_layers, -1)
            scores = _probe(blend, plan_of(probed, nothing), method.select, clock)
        with clock("select"):
            selection = method.select.choose(scores, inputs, layout)
            recompute = method.recompute.choose(selection, inputs, layout)
            plan = plan_of(selection.keep, recompute)
        check = method.recompute.check_layer
        with clock("load"):  # what a check leaves out is not known yet
            context.load(plan.blocks if check is None else selection.keep)
        plans = [plan]

        def decide(checked: Checked) -> PassPlan:
            assert check is not None
            later = recompute.clone()
            later[check + 1 :] = method.recompute.choose_after(checked, layout)
            plans.append(plan_of(selection.keep, later))
            return plans[-1]

        rule = choice.eviction
        cache: WorkingCache
        if isinstance(rule, Quest):
            cache = SparseCache(
                model.n_layers, context, rule.budget(layout.n_context), request.capacity,
                method.attend, n_tokens=layout.n_tokens, model=model,
            )  # fmt: skip
        else:
            drops = rule if isinstance(rule, DroppingEviction) else None
            cache = DenseCache(
                model.n_layers, request.capacity, n_tokens=layout.n_tokens, rule=drops,
                weigh=method.attend, model=model,
            )  # fmt: skip
        prefixes, leaves = request.prefixes, None
        with clock("blend"):
            if prefixes is not None:
                leaves = prefixes.begin(
                    choice.fingerprint.computed_by, layout.token_ids[: choice.n_left],
                    choice.n_found, model.token_kv_bytes,
                )  # fmt: skip
            logits = replace(
                blend, cache=cache, check=None if check is None else (check, decide), leaves=leaves,
                watch=request.watch,
            ).run(plan)  # fmt: skip
            if prefixes is not None and leaves is not None:
                prefixes.keep(leaves)
        if request.watch is not None:
            request.watch.see_plan(layout, plans[-1])
        ran = method.way
        if choice.whole:
            ran = "prefix" if choice.held else "recompute"
        report = report_of(
            model, request.resolved, layout, cache, plans[-1], clock, ran=ran,
            method=request.method.name, eviction=choice.eviction, n_held=choice.n_held,
        )  # fmt: skip
        return FirstToken(
            logits=logits, cache=cache, layout=layout, report=report, stages=clock.stages
        )


def _probe(blend: Blend, plan: PassPlan, select: Select, clock: Stopwatch) -> Tensor:
    """What a selection makes of every layer of a probe, stacked."""
    scores: list[Tensor] = []

    def observe(probed: ProbedLayer) -> None:
        scores.append(select.score(probed, blend.layout).to(blend.model.layer_devices[0]))

    with clock("load"):
        blend.context.load(plan.blocks)
    with clock("probe"):
        replace(blend, observe=observe).through_layers(plan)
        return torch.stack(scores)

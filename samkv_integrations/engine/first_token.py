"""From a request to its first token: decide what is computed, load the rest, select, blend."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.cache.store import StoredChunk
from samkv_integrations.engine.blend import Blend, PassPlan, plan_pass
from samkv_integrations.engine.costs import is_whole
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.engine.prefix_cache import Prefix
from samkv_integrations.engine.report import Stopwatch, report_of
from samkv_integrations.engine.request import FirstToken, Request
from samkv_integrations.engine.working_cache import DenseCache, SparseCache, WorkingCache
from samkv_integrations.errors import InvalidOption, PromptTooLong
from samkv_integrations.eviction import Eviction
from samkv_integrations.eviction.base import DroppingEviction, SparseEviction
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import Checked, ProbedLayer, SelectAll, overwrite
from samkv_integrations.methods.baselines import RecomputeAll, RecomputeInexact
from samkv_integrations.prompt.layout import ChunkPart, Layout


def first_token(request: Request) -> FirstToken:
    """The first token of an answer. Nothing that depends on the prompt is ever stored.

    A cache that fails while it is read becomes a miss, and the request starts again without it.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method cannot be used with the model.
        ChunkNotCached: a cache failed, and ``on_miss`` is ``error``.
    """
    clock, resolved = Stopwatch(), request.resolved
    while True:
        choice = choose(request)
        if choice.missed:
            with clock("compute_chunks"):
                made = request.chunks.compute_for(choice.missed, resolved.since)
                resolved.add_computed(made)
                choice = choose(request, may_compute=False)
        try:
            return _compute(request, choice, clock)
        except ChunkLost as lost:
            clock.bytes_lost += lost.chunk.bytes_read
            resolved.lose(lost.chunk, lost.miss)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a prompt is computed.

    missed: token ids -> text of the chunks to compute as chunks first; then choose again.
    whole: whether the prompt is computed in full. method: the request's, or full prefill.
    eviction: which KV entries are kept after the first token.
    layout: of the prompt, with the chunk tokens behind those that are held. opened: the caches of
    these chunks.
    held: entries of the first n_held tokens, from the prefix cache, which has n_found of them.
    fingerprint: of what is computed now. n_left: first tokens whose entries will be full prefill's,
    and go to the prefix cache.
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
    """Decide, for each token, whether to compute it, load it, or take it from the prefix cache.

    Causal attention makes the tokens before the first reused chunk independent of everything that
    is reused: the chat template's head, the system prompt, earlier turns, and chunks that are
    computed with the prompt. The longest held prefix of them is taken, the rest is blended.
    ``recompute`` takes no chunk from the prefix cache: other methods are compared with it.

    may_compute: whether missed chunks may be computed as chunks. ``auto`` leaves them to full
        prefill where that is faster, ``recompute`` always.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method cannot be used with the model.
    """
    model, method, costs, resolved = (
        request.model, request.method, request.costs, request.resolved,
    )  # fmt: skip
    if method.attend is not None and not model.scores_plainly:
        raise InvalidOption(
            f"method {method.name!r} weighs attention scores in its own way, and {model.name!r} "
            "bounds them or has sinks; choose another method, such as 'auto'"
        )
    # the whole prompt, and its chunks without a cache
    fingerprint, prefix_ids = request.chunks.fingerprint, request.chunks.prefix
    may_compute &= resolved.on_miss == "compute" and method.recompute.uses_caches
    parts: list[ChunkPart] = []
    missed: dict[tuple[int, ...], str] = {}
    for chunk in resolved.chunks:
        blocks = None if chunk.stored is None else chunk.stored.blocks
        parts.append(ChunkPart(runs=chunk.runs, blocks=blocks, is_exact=chunk.is_exact))
        if may_compute and blocks is None and chunk.text is not None:
            missed[chunk.token_ids] = chunk.text
    layout = Layout.of(resolved.token_ids, parts, prefix_ids)
    window = min(request.settings.context_window or sys.maxsize, model.context_window)
    if layout.n_tokens + request.capacity > window:
        raise PromptTooLong(
            f"prompt of {layout.n_tokens} tokens (chunks at full size) and {request.capacity} new "
            f"tokens exceed the context window of {window} of {model.name!r}; retrieve "
            "fewer chunks or ask for fewer tokens"
        )

    # what the prefix cache holds of it, and how much of that a blended or a full pass may take
    first_chunk = parts[0].runs[0].position if parts else layout.n_tokens
    rule, whole_rule, found = request.eviction, request.whole_eviction, None
    if request.prefixes is not None:
        found = request.prefixes.find(fingerprint.computed_by, layout.token_ids)
    n_found = 0 if found is None else found.n_tokens
    # into chunks only where nothing is selected: tokens that are held are always attended to
    reaches = method.recompute.uses_caches and method.select.keeps_all
    reaches &= method.attend is None and rule is None
    n_blended = n_found if reaches else min(n_found, first_chunk)
    n_blended = _before_queries(n_blended, layout, rule)
    n_whole = _before_queries(min(n_found, first_chunk), layout, whole_rule)
    if whole_rule is None and method.whole_if_faster:
        n_whole = n_found
    blended, opened = layout, resolved.opened
    if n_blended > first_chunk:
        behind = [part.behind(n_blended) for part in parts]
        blended = Layout.of(resolved.token_ids, [part for part in behind if part], prefix_ids)
        there = zip(resolved.chunks, behind, strict=True)
        opened = [chunk.stored for chunk, part in there if part and chunk.stored]

    # blend, or compute in full
    if missed and costs is not None:
        lengths = [len(ids) for ids in missed]  # whole chunks, of which the prompt may hold a part
        full_s = costs.full_prefill_s(layout.n_tokens, n_whole)
        both_s = costs.chunks_s(lengths, len(prefix_ids))
        both_s += costs.blended_s(method, blended, lengths, n_blended)
        if both_s > full_s or is_whole(method, costs, layout, blended, lengths, n_whole, n_blended):
            missed = {}
    whole = is_whole(method, costs, layout, blended, (), n_whole, n_blended)
    if layout.n_chunks and not blended.n_chunks:  # all chunks are held: full prefill goes on
        whole, n_whole = True, n_blended
    if not whole:
        n_held, layout = n_blended, blended
        n_left = int(layout.context_positions[0]) if layout.n_context else first_chunk
    else:
        n_held, rule, n_left = n_whole, whole_rule, first_chunk
        if parts and method.whole_if_faster:
            n_left = parts[-1].runs[-1].span.stop
        # quantised entries are never exact, wherever their chunk stands
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
    """At most ``n_tokens``: the first tokens whose queries an eviction rule does not need.

    Uncached tokens always stay, so the last n of them reach back at least as far as the last n
    entries.
    """
    if not isinstance(rule, DroppingEviction) or rule.n_queries == 0:
        return n_tokens
    uncached = layout.uncached.nonzero()[:, 0]
    if rule.n_queries is None or rule.n_queries > len(uncached):
        return 0
    return min(n_tokens, int(uncached[-rule.n_queries]))


def _compute(request: Request, choice: Choice, clock: Stopwatch) -> FirstToken:
    """Load, select and blend as chosen. Raises ChunkLost if a cache cannot be read."""
    model, layout, method, prefixes = (
        request.model, choice.layout, choice.method, request.prefixes,
    )  # fmt: skip
    n_layers, rule = model.n_layers, choice.eviction
    check = method.recompute.check_layer

    def plan_of(keep: Tensor, recompute: Tensor) -> PassPlan:
        return plan_pass(
            layout, keep, recompute, devices=model.layer_devices, dtype=model.dtype,
            n_held=choice.n_held, mixes=method.update is not overwrite,
            weighs=method.attend is not None, windows=model.windows_within(layout.n_tokens),
        )  # fmt: skip

    # Computed apart from the prompt's rotation: behind a prefix that the prompt does not have,
    # chunk positions may exceed the prompt's length.
    is_global = method.positions == "global"
    cached_at = layout.context_positions if is_global else layout.prefilled_positions
    cached_rotation = model.rotation(cached_at)
    with Context(layout, choice.opened, choice.fingerprint, cached_rotation) as context:
        blend = Blend(
            model=model, layout=layout, context=context, update=method.update,
            rotation=model.rotation(torch.arange(layout.n_tokens)), weigh=method.attend,
            held=choice.held,
        )  # fmt: skip
        with clock("load"):
            inputs = context.inputs(method.needs, request.stable_layers)

        scores = None
        if method.select.probes:
            probe = plan_of(
                method.select.probe_blocks(layout).expand(n_layers, -1),
                torch.zeros(n_layers, layout.n_context, dtype=torch.bool),
            )
            of_layers: list[Tensor] = []

            def observe(probed: ProbedLayer) -> None:
                of_layers.append(method.select.score(probed, layout).to(model.layer_devices[0]))

            with clock("load"):
                context.load(probe.blocks)
            with clock("probe"):
                replace(blend, observe=observe).through_layers(probe)
                scores = torch.stack(of_layers)
        with clock("select"):
            selection = method.select.choose(scores, inputs, layout)
            recompute = method.recompute.choose(selection, inputs, layout)
            plan = plan_of(selection.keep, recompute)
        with clock("load"):
            # before the check layer has been computed, any kept entry may be needed
            context.load(plan.blocks if check is None else selection.keep)

        last_plan = plan

        def decide(checked: Checked) -> PassPlan:
            nonlocal last_plan
            assert check is not None
            later = recompute.clone()
            later[check + 1 :] = method.recompute.choose_after(checked, layout)
            last_plan = plan_of(selection.keep, later)
            return last_plan

        cache: WorkingCache
        if isinstance(rule, SparseEviction):
            cache = SparseCache(
                n_layers, context, rule, rule.budget(layout.n_context), request.capacity,
                method.attend, n_tokens=layout.n_tokens, model=model,
            )  # fmt: skip
        else:
            cache = DenseCache(
                n_layers, request.capacity, n_tokens=layout.n_tokens, weigh=method.attend,
                rule=rule if isinstance(rule, DroppingEviction) else None, model=model,
            )  # fmt: skip
        with clock("blend"):
            leaves = None
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
            request.watch.see_plan(layout, last_plan)
        ran = method.way
        if choice.whole:
            ran = "prefix" if choice.held else "recompute"
        report = report_of(
            model, request.resolved, layout, cache, last_plan, clock, ran=ran,
            method=request.method.name, eviction=rule, n_held=choice.n_held,
        )  # fmt: skip
        return FirstToken(
            logits=logits, cache=cache, layout=layout, report=report, stages=clock.stages
        )

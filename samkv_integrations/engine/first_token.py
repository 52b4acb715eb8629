"""From a request to its first token: decide what is computed, load the rest, select, blend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.cache.hot import HotChunks
from samkv_integrations.cache.store import StoredChunk
from samkv_integrations.engine.blend import Blend, PassPlan, plan_pass
from samkv_integrations.engine.costs import MARGIN, is_whole
from samkv_integrations.engine.loader import ChunkLost, Context
from samkv_integrations.engine.prefix_cache import Prefix
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.request import FirstToken, Request
from samkv_integrations.engine.working_cache import DenseCache, SparseCache, WorkingCache
from samkv_integrations.errors import InvalidOption, OutOfMemory, PromptTooLong
from samkv_integrations.eviction import Eviction
from samkv_integrations.eviction.base import DroppingEviction, SparseEviction
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import Checked, ProbedLayer, SelectAll, overwrite
from samkv_integrations.methods.baselines import RecomputeAll, RecomputeInexact
from samkv_integrations.prompt.layout import ChunkPart, Layout


def first_token(request: Request) -> FirstToken:
    """The first token of an answer. Nothing that depends on the prompt is ever stored.

    A cache that fails while it is read becomes a miss, and the request starts again without it. A
    device that runs out of memory frees its hot chunks, and the request starts once more.

    Raises:
        OutOfMemory: the device has no memory for it without them either.
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method cannot be used with the model, or chooses with a wrong shape.
        ChunkNotCached: a cache failed, and ``on_miss`` is ``error``.
    """
    resolved, is_last = request.resolved, False
    while True:
        try:
            choice = choose(request)
            if choice.missed:
                with request.stage("compute_chunks"):
                    made = request.chunks.compute_for(choice.missed, resolved.since)
                    resolved.add_computed(made)
                    choice = choose(request, may_compute=False)
            return _compute(request, choice)
        except ChunkLost as lost:
            resolved.lose(lost.chunk, lost.miss)
        except torch.OutOfMemoryError as error:
            HotChunks.clear_all()
            if is_last:
                raise OutOfMemory.on(request.model.device) from error
            is_last = True  # the next try begins when the tensors of this one are free


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a prompt is computed.

    missed: token ids -> text of the chunks to compute as chunks first; then choose again.
    whole: whether the prompt is computed in full. method: the request's, or full prefill.
    eviction: which KV entries are kept after the first token.
    layout: of the prompt, with the chunk tokens behind those that are held. opened: the caches of
    these chunks.
    held: entries of the first ``n_held`` tokens, from the prefix cache. leaves: takes the entries
    that go there: those of the first tokens that will be full prefill's. fingerprint: of what is
    computed.
    """

    missed: Mapping[tuple[int, ...], str]
    whole: bool
    method: Method
    eviction: Eviction | None
    layout: Layout
    opened: Sequence[StoredChunk]
    held: Prefix | None
    n_held: int
    leaves: Prefix | None
    fingerprint: Fingerprint


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
    model, method = request.model, request.method
    costs, resolved = request.costs, request.resolved
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
        parts.append(ChunkPart(runs=chunk.runs, blocks=blocks))
        if may_compute and blocks is None and chunk.text is not None:
            missed[chunk.token_ids] = chunk.text
    layout = Layout(resolved.token_ids, parts, prefix_ids)
    window = request.settings.window_of(model)
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
        blended = Layout(resolved.token_ids, [part for part in behind if part], prefix_ids)
        there = zip(resolved.chunks, behind, strict=True)
        opened = [chunk.stored for chunk, part in there if part and chunk.stored]

    # blend, or compute in full
    if missed and costs is not None:
        lengths = [len(ids) for ids in missed]  # whole chunks, of which the prompt may hold a part
        both_s = costs.chunks_s(lengths, len(prefix_ids))
        both_s += costs.blended_s(method, blended, lengths, n_blended)
        if both_s > MARGIN * costs.full_prefill_s(layout.n_tokens, n_whole):
            missed = {}
    whole = is_whole(method, costs, layout, blended, n_whole, n_blended)
    if layout.n_chunks and not blended.n_chunks:  # all chunks are held: full prefill goes on
        whole, n_whole = True, n_blended
    if whole:
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
            layout, opened = Layout(resolved.token_ids, (), ()), []
    else:
        n_held, layout = n_blended, blended
        n_left = int(layout.context_positions[0]) if layout.n_context else first_chunk
    leaves = None
    if request.prefixes is not None:
        leaves = request.prefixes.begin(
            fingerprint.computed_by, layout.token_ids[:n_left], n_found, model.token_kv_bytes
        )
    return Choice(
        missed=missed, whole=whole, method=method, eviction=rule, layout=layout, opened=opened,
        held=found.first(n_held) if found is not None and n_held else None, n_held=n_held,
        leaves=leaves, fingerprint=fingerprint,
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


def _compute(request: Request, choice: Choice) -> FirstToken:
    """Load, select and blend as chosen. Raises ChunkLost if a cache cannot be read."""
    model, layout, method = request.model, choice.layout, choice.method
    n_layers, rule = model.n_layers, choice.eviction
    check = method.recompute.check_layer

    def plan_of(keep: Tensor, recompute: Tensor) -> PassPlan:
        return plan_pass(
            model, layout, keep, recompute, n_held=choice.n_held,
            mixes=method.update is not overwrite, weighs=method.attend is not None,
        )  # fmt: skip

    # Computed apart from the prompt's rotation: behind a prefix that the prompt does not have,
    # chunk positions may exceed the prompt's length.
    is_global = method.positions == "global"
    cached_at = layout.context_positions if is_global else layout.prefilled_positions
    cached_rotation = model.rotation(cached_at)
    with Context(
        layout, choice.opened, choice.fingerprint, cached_rotation, request.chunks.hot
    ) as context:
        blend = Blend(
            model=model, layout=layout, context=context, update=method.update,
            rotation=model.rotation(torch.arange(layout.n_tokens)), weigh=method.attend,
            held=choice.held,
        )  # fmt: skip
        with request.stage("load"):
            inputs = context.inputs(method.needs, request.stable_layers)

        scores = None
        if (probed_blocks := method.select.probe_blocks(layout)) is not None:
            probe = plan_of(
                probed_blocks.expand(n_layers, -1),
                torch.zeros(n_layers, layout.n_context, dtype=torch.bool),
            )
            of_layers: list[Tensor] = []

            def observe(probed: ProbedLayer) -> None:
                of_layers.append(method.select.score(probed, layout).to(model.layer_devices[0]))

            with request.stage("load"):
                context.load(probe.blocks)
            with request.stage("probe"):
                replace(blend, observe=observe).through_layers(probe)
                scores = torch.stack(of_layers)
        with request.stage("select"):
            keep = method.select.choose(scores, inputs, layout)
            _check_shape(method, "select", keep, (n_layers, layout.n_blocks))
            recompute = method.recompute.choose(keep[:, layout.block_of_token], inputs, layout)
            _check_shape(method, "recompute", recompute, (n_layers, layout.n_context))
            plan = plan_of(keep, recompute)
        with request.stage("load"):
            # before the check layer has been computed, any kept entry may be needed
            context.load(plan.blocks if check is None else keep)

        last_plan = plan

        def decide(checked: Checked) -> PassPlan:
            nonlocal last_plan
            assert check is not None
            later = recompute.clone()
            later[check + 1 :] = method.recompute.choose_after(checked, layout)
            last_plan = plan_of(keep, later)
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
        with request.stage("blend"):
            logits = replace(
                blend, cache=cache, check=None if check is None else (check, decide),
                leaves=choice.leaves, watch=request.watch,
            ).run(plan)  # fmt: skip
            if request.prefixes is not None and choice.leaves is not None:
                request.prefixes.keep(choice.leaves)
        report = _report_of(request, choice, cache, last_plan)
        return FirstToken(logits=logits, cache=cache, layout=layout, report=report)


def _check_shape(method: Method, part: str, chosen: Tensor, shape: tuple[int, int]) -> None:
    """Raises InvalidOption for a choice of another shape, which might be broadcast."""
    if chosen.shape != shape:
        raise InvalidOption(
            f"method {method.name!r}: its {part} part chose with shape {tuple(chosen.shape)}; it "
            f"must be {shape}, layers first"
        )


def _report_of(request: Request, choice: Choice, cache: WorkingCache, plan: PassPlan) -> Report:
    """The report of a first token, after the pass of ``plan``."""
    model, resolved, layout = request.model, request.resolved, choice.layout
    chunks, n_tokens, n_held = resolved.chunks, len(resolved.token_ids), choice.n_held
    spent: defaultdict[str, float] = defaultdict(float)
    for stage in request.stages:
        spent[stage.name] += stage.ended - stage.began
    chunk_of_token = torch.full((n_tokens,), -1)  # by their number in the prompt; -1 for none
    for number, chunk in enumerate(chunks):
        for run in chunk.runs:
            chunk_of_token[run.position : run.span.stop] = number
    is_of_chunk, is_new = chunk_of_token >= 0, [chunk.computed_now for chunk in chunks]
    from_memory = Counter(chunk_of_token[:n_held][is_of_chunk[:n_held]].tolist())

    # tokens of chunks that the answer attends to, mean over layers
    stays = layout.uncached.repeat(model.n_layers, 1)
    stays[:, layout.context_positions] |= plan.kept[:, layout.block_of_token]
    kept = 0.0
    for layer, n_kept in enumerate((stays & is_of_chunk).sum(1).tolist()):
        of_chunks = partial(torch.masked_select, is_of_chunk, stays[layer])
        kept += cache.attended(layer, n_kept, of_chunks)
    kept /= model.n_layers  # divided once, so that all of the context is exactly 1

    # those that were computed: the last token of a prompt always is
    of_context = chunk_of_token[layout.context_positions]
    again = plan.computed | layout.uncached[layout.context_positions]
    made_now = torch.tensor(is_new, dtype=torch.bool)[of_context]
    computed = int((again | made_now).sum()) / model.n_layers
    computed += sum(n for number, n in from_memory.items() if is_new[number])
    n_context, n_in_memory = int(is_of_chunk.sum()), from_memory.total()
    computed += n_context - n_in_memory - layout.n_context  # with the prompt, without a cache
    n_exact = n_in_memory + int((layout.exact[layout.chunk_of_token] & ~again.any(0)).sum())

    # reused: its entries are read, or its cache has told that tokens can be left out
    uses_cache = plan.blocks.any(0)[layout.block_of_token] | ~again.all(0)
    reused = set(of_context[uses_cache & ~made_now].tolist())
    in_memory = {number for number in from_memory if not is_new[number]}
    ran = choice.method.way
    if choice.whole:
        ran = "prefix" if choice.held else "recompute"
    return Report(
        method=request.method.name, ran=ran,
        eviction=None if choice.eviction is None else choice.eviction.name,
        model=model.name, prompt_tokens=n_tokens, context_tokens=n_context, prefix_tokens=n_held,
        kept_ratio=kept / n_context if n_context else 1.0,
        recompute_ratio=computed / n_context if n_context else 0.0,
        uncached_tokens=n_tokens - n_context - (n_held - n_in_memory), exact_tokens=n_exact,
        found=len(chunks), reused=len(reused), prefix_chunks=len(in_memory - reused),
        computed_now=sum(is_new),
        chunk_misses=dict(resolved.misses),
        bytes_read=resolved.bytes_lost + sum(stored.bytes_read for stored in set(resolved.opened)),
        kv_bytes=cache.prompt_bytes, full_kv_bytes=n_tokens * model.token_kv_bytes,
        decode_kv_bytes=cache.kv_bytes,
        probe_s=spent["probe"], select_s=spent["select"], load_s=spent["load"],
        blend_s=spent["blend"],
    )  # fmt: skip

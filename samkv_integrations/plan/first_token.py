"""From a request to its first token: decide what is computed, load the rest, select, blend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samkv_integrations.chunks.chunk import ChunkBlocks, Fingerprint
from samkv_integrations.errors import InvalidOption, OutOfMemory, PromptTooLong
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import SelectAll
from samkv_integrations.methods.baselines import RecomputeAll, RecomputeInexact
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.plan.costs import MARGIN, is_whole
from samkv_integrations.plan.kept_sequences import LEAST, KeptSequence
from samkv_integrations.plan.request import FirstToken, Request
from samkv_integrations.prompt.layout import ChunkPart, Layout, Numbers
from samkv_integrations.report import Report
from samkv_integrations.runtimes.transformers.entries.hot import HotChunks
from samkv_integrations.runtimes.transformers.eviction.base import DroppingEviction, SparseEviction
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.base import (
    BlockSelect,
    LayerRecompute,
)
from samkv_integrations.runtimes.transformers.passes.blend import Blend, PassPlan, plan_pass
from samkv_integrations.runtimes.transformers.passes.loader import ChunkLost, Context
from samkv_integrations.runtimes.transformers.passes.method import (
    Check,
    Probe,
    kept_blocks,
    recomputed_tokens,
)
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    CopiedEntries,
    DenseCache,
    FirstEntries,
    SparseCache,
    WorkingCache,
)
from samkv_integrations.store.base import StoredChunk


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
            request.free_kept()
            if is_last:
                raise OutOfMemory.on(request.model.device) from error
            is_last = True  # the next try begins when the tensors of this one are free


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a prompt is computed.

    missed: token ids -> text of the chunks to compute as chunks first; then choose again.
    whole: whether all that is not in memory is computed in full. method: the request's, or full
    prefill. eviction: which KV entries are kept after the first token.
    layout: of the prompt, with the chunk tokens behind those that are held. opened: the caches of
    these chunks.
    held: has the entries of the first ``n_held`` tokens; those at the positions ``again`` are
    computed again, for this answer alone.
    n_exact, prompts, turns: of the sequence that the pass leaves, see `KeptSequence`.
    stays: whether the working cache will hold the entries of all tokens at all layers.
    fingerprint: of what is computed.
    """

    missed: Mapping[tuple[int, ...], str]
    whole: bool
    method: Method
    eviction: Eviction | None
    layout: Layout
    opened: Sequence[StoredChunk]
    held: KeptSequence[FirstEntries] | None
    n_held: int
    again: Numbers
    n_exact: int
    prompts: tuple[range, ...]
    turns: tuple[int, ...]
    stays: bool
    fingerprint: Fingerprint


def choose(request: Request, *, may_compute: bool = True) -> Choice:
    """Decide, for each token, whether to compute it, load it, or take it from a kept sequence.

    A follow-up goes on from what its conversation has left, chunks and answers included, and the
    chunks behind that are blended. Any other prompt blends its chunks behind exact entries of its
    first tokens, and full prefill goes on from exact entries alone. Whether the prompt is blended
    does not depend on what others have asked.

    may_compute: whether missed chunks may be computed as chunks. ``auto`` leaves them to full
        prefill where that is faster, ``recompute`` always.

    Raises:
        PromptTooLong: prompt and answer exceed the context window.
        InvalidOption: the method cannot be used with the model.
        ChunkNotCached: a chunk has no usable cache, and ``on_miss`` is ``error``.
    """
    model, method = request.model, request.method
    costs, resolved = request.costs, request.resolved
    if method.attend is not None and not model.scores_plainly:
        raise InvalidOption(
            f"method {method.name!r} weighs attention scores in its own way, and {model.name!r} "
            "bounds them or has sinks; choose another method, such as 'auto'"
        )
    n_tokens, window = len(resolved.token_ids), request.settings.window_of(model)
    if n_tokens + request.capacity > window:
        raise PromptTooLong(
            f"prompt of {n_tokens} tokens (chunks at full size) and {request.capacity} new "
            f"tokens exceed the context window of {window} of {model.name!r}; retrieve "
            "fewer chunks, shorten the history, or ask for fewer tokens"
        )

    # what is in memory, and the chunks behind it
    fingerprint, prefix_ids = request.chunks.fingerprint, request.chunks.prefix
    rule, whole_rule, first_chunk = request.eviction, request.whole_eviction, resolved.first_chunk
    kept, n_held = request.look_up()
    may_compute &= resolved.on_miss == "compute" and method.recompute.uses_caches
    parts, opened = list[ChunkPart](), list[StoredChunk]()
    missed: dict[tuple[int, ...], str] = {}
    for chunk in resolved.chunks:
        blocks = None if chunk.stored is None else chunk.stored.blocks
        part = ChunkPart(runs=chunk.runs, blocks=blocks).behind(n_held)
        if part is None:
            continue
        parts.append(part)
        if chunk.stored is not None:
            opened.append(chunk.stored)
        elif may_compute and chunk.text is not None:
            missed[chunk.token_ids] = chunk.text
    layout = Layout(resolved.token_ids, parts, prefix_ids)
    is_follow_up = kept.is_follow_up and n_held == kept.n_tokens

    # blend, or compute in full
    # up to the end of what was asked before: how much more is in memory may hang on others
    n_counted = kept.sequence.n_asked_in(n_held) if is_follow_up and kept.sequence else 0
    if missed and costs is not None:
        lengths = [len(ids) for ids in missed]  # whole chunks, of which the prompt may hold a part
        both_s = costs.chunks_s(lengths, len(prefix_ids))
        both_s += costs.blended_s(method, layout, lengths, n_counted)
        if both_s > MARGIN * costs.full_prefill_s(n_tokens, n_counted):
            missed = {}
    whole = is_whole(method, costs, layout, n_counted)
    is_full_prefill = whole or not method.recompute.uses_caches
    if whole:
        rule = whole_rule
        # quantised entries are never exact, wherever their chunk stands
        is_rounded = fingerprint.entry_format.is_quantised
        everything = RecomputeAll() if is_rounded else RecomputeInexact()
        method = replace(
            method, select=SelectAll(), recompute=everything, update=None, eviction=None
        )
        if not is_follow_up:
            kept = request.beginning(is_exact=True)
            n_held = kept.n_tokens if rule is None else min(kept.n_tokens, first_chunk)
            if n_held > first_chunk:
                layout, opened = Layout(resolved.token_ids, (), ()), []
    n_held = _before_queries(n_held, layout, rule)

    again = np.empty(0, np.int64)
    if is_follow_up and kept.sequence is not None:
        again = _again(request, kept.sequence, n_held)
    n_exact, prompts = _left(request, layout, kept.sequence, n_held, is_full_prefill)
    turns: tuple[int, ...] = (n_held,)
    if kept.sequence is not None:
        n_before = kept.sequence.n_prompts_in(n_held)
        begins = kept.sequence.turn_in(n_held, request.n_asked)
        turns = (*kept.sequence.turns[:n_before], begins)
    if len(again):  # all that is new hangs on what this question has had computed again
        prompts = (*prompts[:-1], range(min(turns[-1], prompts[-1].start), prompts[-1].stop))
    return Choice(
        missed=missed, whole=whole, method=method, eviction=rule, layout=layout, opened=opened,
        held=kept.sequence if n_held else None, n_held=n_held, again=again, n_exact=n_exact,
        prompts=prompts, turns=turns,
        stays=rule is None and method.select.keeps_all and method.attend is None,
        fingerprint=fingerprint,
    )  # fmt: skip


def _again(request: Request, source: KeptSequence[FirstEntries], n_held: int) -> Numbers:
    """Positions of tokens in memory that a follow-up's question needs computed again, in order."""
    resolved, made_by, none = request.resolved, request.chunks.fingerprint, np.empty(0, np.int64)
    asked = range(source.turn_in(n_held, request.n_asked), request.n_asked)
    if not asked or not asked.start:
        return none
    parts = [
        ChunkPart(
            runs=chunk.runs,
            blocks=ChunkBlocks(n_tokens=len(chunk.token_ids), scheme=made_by.scheme),
        ).within(n_held)
        for chunk in resolved.chunks
    ]
    layout = Layout(
        resolved.token_ids, [part for part in parts if part], request.chunks.prefix, asked
    )
    given = ~source.from_cache[layout.context_positions]
    if not layout.n_context or bool(given.all()):
        return none
    return layout.context_positions[request.method.recompute.choose_again(layout, given)]


def _left(
    request: Request, layout: Layout, source: KeptSequence[FirstEntries] | None, n_held: int,
    is_full_prefill: bool,
) -> tuple[int, tuple[range, ...]]:  # fmt: skip
    """``n_exact`` and ``prompts`` of the sequence that a pass leaves, see `KeptSequence`.

    layout: with the chunks that are blended. source: has the first ``n_held`` tokens.
    """
    resolved, n_exact, prompts = request.resolved, 0, tuple[range, ...]()
    if source is not None:
        n_exact = min(n_held, source.n_exact)
        prompts = source.prompts[: source.n_prompts_in(n_held)]
    n_tokens, n_asked = layout.n_tokens, request.n_asked
    if n_exact == n_held and is_full_prefill:
        n_exact = n_tokens
    elif n_exact == n_held and int(layout.context_positions[0]) >= n_held + LEAST:
        n_exact = int(layout.context_positions[0])  # fewer may be computed faster, not exactly

    n_before = max(n_held, prompts[-1].stop if prompts else 0)
    begins = (
        max(n_before, run.position)
        for chunk in resolved.chunks for run in chunk.runs if n_before < run.span.stop
    )  # fmt: skip
    return n_exact, (*prompts, range(min(next(begins, n_asked), n_asked), n_asked))


def _before_queries(n_tokens: int, layout: Layout, rule: Eviction | None) -> int:
    """At most ``n_tokens``: the first tokens whose queries an eviction rule does not need.

    Uncached tokens always stay, so the last n of them reach back at least as far as the last n
    entries.
    """
    if not isinstance(rule, DroppingEviction) or rule.n_queries == 0:
        return n_tokens
    uncached = np.flatnonzero(layout.uncached)
    if rule.n_queries is None or rule.n_queries > len(uncached):
        return 0
    return min(n_tokens, int(uncached[-rule.n_queries]))


def _compute(request: Request, choice: Choice) -> FirstToken:
    """Load, select and blend as chosen. Raises ChunkLost if a cache cannot be read."""
    model, layout, method = request.model, TensorLayout(choice.layout), choice.method
    n_layers, rule, again = model.n_layers, choice.eviction, torch.from_numpy(choice.again)

    def plan_of(keep: Tensor, recompute: Tensor) -> PassPlan:
        return plan_pass(
            model, layout, keep, recompute, n_held=choice.n_held, again=again,
            mixes=method.update is not None, weighs=method.attend is not None,
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
            model=model, context=context, update=method.update,
            rotation=model.rotation(torch.arange(layout.n_tokens)), weigh=method.attend,
            held=None if choice.held is None else choice.held.entries,
            is_exact=choice.n_exact > choice.n_held,
        )  # fmt: skip
        with request.stage("load"):
            inputs = context.inputs(method.needs, request.stable_layers)

        scores, select = None, method.select
        probed_blocks = select.probe_blocks(layout) if isinstance(select, BlockSelect) else None
        if isinstance(select, BlockSelect) and probed_blocks is not None:
            probe = plan_of(
                probed_blocks.expand(n_layers, -1),
                torch.zeros(n_layers, layout.n_context, dtype=torch.bool),
            )
            observer = Probe(
                select=select, layout=layout, rotation=blend.rotation,
                device=model.layer_devices[0],
            )  # fmt: skip
            with request.stage("load"):
                context.load(probe.blocks)
            with request.stage("probe"):
                replace(blend, observers=(observer,)).through_layers(probe)
                scores = observer.scores
        with request.stage("select"):
            keep = kept_blocks(method, scores, inputs, layout)
            recompute = recomputed_tokens(method, keep, inputs, layout)
            plan = plan_of(keep, recompute)
        check, observers = None, request.observers
        if isinstance(part := method.recompute, LayerRecompute) and part.check_layer is not None:
            first = part.check_layer + 1

            def replan(chosen: Tensor) -> PassPlan:
                later = recompute.clone()
                later[first:] = chosen
                return plan_of(keep, later)

            check = Check(recompute=part, layout=layout, context=context, replan=replan)
            observers = (*observers, check)
        with request.stage("load"):
            # before the check layer has been computed, any kept entry may be needed
            context.load(plan.blocks if check is None else keep)

        # what later prompts may go on from: the working cache, or copies of the first entries
        keeps, filled = request.keeps and choice.stays, None
        n_copied = min(choice.n_exact, request.resolved.first_chunk)
        if request.keeps and not keeps and n_copied >= choice.n_held + LEAST:
            filled = CopiedEntries(n_tokens=n_copied)
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
                keeps_all=keeps,
            )  # fmt: skip
        with request.stage("blend"):
            logits = replace(
                blend, cache=cache, prefix_to_fill=filled, observers=observers,
            ).run(plan)  # fmt: skip
        last_plan = plan if check is None or check.plan is None else check.plan
        report = _report_of(request, choice, cache, last_plan)
    kept = None
    if keeps and isinstance(cache, DenseCache):
        from_cache = np.zeros(layout.n_tokens, np.bool_)
        if choice.held is not None:
            from_cache[: choice.n_held] = choice.held.from_cache[: choice.n_held]
        is_computed = last_plan.computed.all(0) | layout.uncached[layout.context_positions]
        # nor are exact ones computed again for a later question
        is_given = is_computed | layout.exact[layout.chunk_of_token]
        from_cache[layout.context_positions] = ~is_given
        if choice.held is not None and len(again):
            cache.lend(again, choice.held.entries)
        kept = _kept(request, choice, cache, from_cache, choice.prompts)
    elif filled is not None:
        _kept(request, choice, filled, np.zeros(n_copied, np.bool_), ())
    report = replace(report, stays=kept is not None)
    return FirstToken(logits=logits, cache=cache, layout=choice.layout, report=report, kept=kept)


def _kept(
    request: Request, choice: Choice, entries: FirstEntries, from_cache: NDArray[np.bool_],
    prompts: tuple[range, ...],
) -> KeptSequence[FirstEntries] | None:  # fmt: skip
    """Keep the entries of a prompt's first tokens; None where there is no room.

    Where some were computed again for this answer, the prompt is kept with the answer, at its end.
    """
    n_tokens = len(from_cache)
    made = KeptSequence(
        made_by=choice.fingerprint.computed_by, way=request.way,
        deletion=request.resolved.since, token_ids=request.token_ids[:n_tokens],
        n_exact=min(choice.n_exact, n_tokens), from_cache=from_cache, prompts=prompts,
        turns=choice.turns if prompts else (), entries=entries, n_bytes=entries.n_bytes,
    )  # fmt: skip
    return made if len(choice.again) or request.keep(made) else None


def _report_of(request: Request, choice: Choice, cache: WorkingCache, plan: PassPlan) -> Report:
    """The report of a first token, after the pass of ``plan``."""
    model, resolved, layout = request.model, request.resolved, TensorLayout(choice.layout)
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
    computed += sum(not is_new[number] for number in chunk_of_token[choice.again].tolist())
    n_context, n_in_memory = int(is_of_chunk.sum()), from_memory.total()
    computed += n_context - n_in_memory - layout.n_context  # with the prompt, without a cache
    n_exact = int(is_of_chunk[: min(n_held, choice.n_exact)].sum()) + int(
        (layout.exact[layout.chunk_of_token] & ~again.any(0)).sum()
    )

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

"""The report of a first token, from the plan and the result of the pass."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from samkv_integrations.plan.plan import Plan
from samkv_integrations.plan.request import Request
from samkv_integrations.report import Report
from samkv_integrations.runtimes.base import Begun


def describe(request: Request, plan: Plan, begun: Begun) -> Report:
    """The report after a prompt pass. Later figures, such as ``ttft_s``, are still 0."""
    model, resolved, work = request.model, request.resolved, plan.work
    layout, chunks, n_held = work.layout, resolved.chunks, work.held.n_tokens
    spent: defaultdict[str, float] = defaultdict(float)
    for stage in request.stages:
        spent[stage.name] += stage.ended - stage.began
    of_chunk = resolved.chunk_of_token  # (T,) number of each token's chunk, -1 for none
    is_of_chunk, is_new = of_chunk >= 0, np.array([chunk.computed_now for chunk in chunks], bool)
    n_tokens, n_context = len(of_chunk), int(is_of_chunk.sum())
    from_memory = Counter(of_chunk[:n_held][is_of_chunk[:n_held]].tolist())
    n_in_memory = from_memory.total()

    # tokens of chunks that were computed, in shares of the layers
    of_context = of_chunk[layout.context_positions]
    is_made_now = is_new[of_context]
    computed = float(np.where(is_made_now, 1.0, begun.computed).sum())
    computed += sum(n for number, n in from_memory.items() if is_new[number])
    computed += int((~is_new[of_chunk[work.held.again]]).sum())
    computed += n_context - n_in_memory - layout.n_context  # with the prompt, without a cache
    is_exact = layout.exact[layout.chunk_of_token] & (begun.computed == 0)
    n_exact = int(is_of_chunk[: min(n_held, work.held.n_exact)].sum() + is_exact.sum())

    # reused: its entries are read, or its cache has told that tokens can be left out
    uses_cache = (begun.is_read | (begun.computed < 1)) & ~is_made_now
    reused = set(of_context[uses_cache].tolist())
    in_memory = {number for number in from_memory if not is_new[number]}
    ran = work.method.way
    if plan.is_full:
        ran = "prefix" if plan.source else "recompute"
    sequence = begun.sequence
    of_opened = sum(stored.bytes_read for stored in set(resolved.opened))
    return Report(
        method=request.how.method.name, ran=ran,
        eviction=None if work.eviction is None else work.eviction.name,
        model=model.name, prompt_tokens=n_tokens, context_tokens=n_context, prefix_tokens=n_held,
        kept_ratio=begun.n_attended / n_context if n_context else 1.0,
        recompute_ratio=computed / n_context if n_context else 0.0,
        uncached_tokens=n_tokens - n_context - (n_held - n_in_memory), exact_tokens=n_exact,
        found=len(chunks), reused=len(reused), prefix_chunks=len(in_memory - reused),
        computed_now=int(is_new.sum()), chunk_misses=dict(resolved.misses.reasons),
        bytes_read=resolved.misses.bytes_read + of_opened,
        kv_bytes=sequence.prompt_bytes, full_kv_bytes=n_tokens * model.token_kv_bytes,
        decode_kv_bytes=sequence.kv_bytes,
        probe_s=spent["probe"], select_s=spent["select"], load_s=spent["load"],
        blend_s=spent["blend"],
    )  # fmt: skip

"""What a first token cost: seconds of each stage, and the report."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from samkv_integrations.engine.report import Report
from samkv_integrations.engine.request import Request
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.eviction import Eviction
from samkv_integrations.prompt.layout import Layout


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


def report_of(
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

"""What a first token cost: seconds of each stage, and the report."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from samkv_integrations.engine.plan import PassPlan
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.request import Request
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.eviction import Eviction
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.resolve import Resolved


class Stopwatch:
    """Seconds spent in each stage of a request, which do not overlap, and when that was.

    On a GPU a stage counts until its work is launched; the first one that waits for the device
    counts what came before.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.stages: list[Stage] = []
        self.bytes_lost = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[stage] += ended - began
            self.stages.append(Stage(name=stage, began=began, ended=ended))


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """What became of a prompt's chunks.

    kept, computed: their tokens that a step of the answer attends to, and that were computed, mean
    over layers. held: those that were held in memory. reused: chunks of which an entry that was
    there before the prompt was used.
    """

    kept: float
    computed: float
    reused: int
    held: int = 0

    @classmethod
    def behind(cls, n_held: int, resolved: Resolved) -> ChunkWork:
        """Where full prefill went on from the ``n_held`` first tokens of the prompt."""
        kept = computed = reused = held = 0
        for chunk in resolved.chunks:
            of_chunk = sum(
                len(range(run.span.start, min(n_held, run.span.stop))) for run in chunk.runs
            )
            kept += chunk.n_tokens
            held += of_chunk
            computed += chunk.n_tokens if chunk.computed_now else chunk.n_tokens - of_chunk
            reused += of_chunk > 0 and not chunk.computed_now
        return cls(kept=kept, computed=computed, reused=reused, held=held)

    @classmethod
    def of_pass(
        cls, request: Request, layout: Layout, cache: WorkingCache, plan: PassPlan
    ) -> ChunkWork:
        """Where a pass over the chunks' caches has given the first token."""
        n_layers, resolved = request.model.n_layers, request.resolved
        of_chunks = torch.zeros_like(layout.uncached)
        for span in (run.span for chunk in resolved.chunks for run in chunk.runs):
            of_chunks[span.start : span.stop] = True
        stays = layout.uncached.repeat(n_layers, 1)
        stays[:, layout.context_positions] |= plan.kept[:, layout.block_of_token]
        kept = sum(cache.attended(at, of_chunks[stays[at]]) for at in range(n_layers))
        is_new = torch.tensor(
            [chunk.computed_now for chunk in resolved.chunks if chunk.stored is not None],
            dtype=torch.bool,
        )
        # the last token is computed whatever it is of
        again = plan.computed | layout.uncached[layout.context_positions]
        computed = again | is_new[layout.chunk_of_token]
        uses_cache = torch.zeros_like(is_new)
        uses_cache[layout.block_chunk[plan.blocks.any(0)]] = True
        # what is left out was not computed either: the cache has told that it is not needed
        uses_cache[layout.chunk_of_token[~again.all(0)]] = True
        return cls(
            kept=kept / n_layers,
            computed=int(computed.sum()) / n_layers + layout.n_missed,
            reused=int((uses_cache & ~is_new).sum()),
        )


def report_of(
    request: Request,
    cache: WorkingCache,
    clock: Stopwatch,
    *,
    ran: str,
    eviction: Eviction | None,
    work: ChunkWork,
    prefix_tokens: int,
) -> Report:
    """The figures so far."""
    model, spent, resolved = request.model, clock.seconds, request.resolved
    n_tokens, n_context = len(resolved.token_ids), resolved.n_context
    missed: Counter[str] = Counter()
    for chunk in resolved.chunks:
        if chunk.stored is None and chunk.miss is not None:
            missed[chunk.miss] += chunk.n_tokens
    return Report(
        method=request.method.name,
        ran=ran,
        eviction=None if eviction is None else eviction.name,
        model=model.name,
        prompt_tokens=n_tokens,
        context_tokens=n_context,
        prefix_tokens=prefix_tokens,
        kept_ratio=work.kept / n_context if n_context else 1.0,
        recompute_ratio=work.computed / n_context if n_context else 0.0,
        uncached_tokens=n_tokens - n_context - (prefix_tokens - work.held),
        found=len(resolved.chunks),
        reused=work.reused,
        computed_now=sum(chunk.computed_now for chunk in resolved.chunks),
        chunk_misses=dict(resolved.misses),
        missed_tokens=dict(missed),
        bytes_read=clock.bytes_lost + resolved.bytes_read,
        kv_bytes=cache.prompt_bytes,
        full_kv_bytes=n_tokens * model.token_kv_bytes,
        decode_kv_bytes=cache.kv_bytes,
        probe_s=spent["probe"],
        select_s=spent["select"],
        load_s=spent["load"],
        blend_s=spent["blend"],
        announce_s=0.0,
        wait_s=0.0,
        ttft_s=0.0,
        completion_tokens=0,
        decode_tokens_per_s=0.0,
    )

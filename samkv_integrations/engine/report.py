"""What answers cost: the report of one, the same fields for every method, and totals of several."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import starmap
from typing import Any

import torch

from samkv_integrations.engine.blend import PassPlan
from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.eviction import Eviction
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class Stage:
    """When a stage of an answer was: times of `time.perf_counter`."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of one answer.

    method, eviction: names; None without eviction. ran: what the method came to: its own name,
        ``recompute`` where it computed everything, ``prefix`` where it computed everything that
        was not held from a prompt with the same beginning.
    prompt_tokens: of the whole prompt. context_tokens: those in runs of at least 16 that are a
        chunk's; all others are computed as text.
        prefix_tokens: the first ones of the prompt, as far as an earlier prompt with the same
        beginning has left them in memory: up to the first chunk, and with ``prefix`` in chunks too.
    kept_ratio: context tokens that the answer goes on with after its first token, so after an
        eviction, mean over layers and key-value heads, over all context tokens; with quest, those
        that a step attends to.
    recompute_ratio: context tokens computed at query time, mean over layers, likewise. Chunks that
        are ``computed_now``, or have no usable cache, count as computed whole.
    uncached_tokens: tokens outside chunks that were computed: all but those of ``prefix_tokens``.
        What was not computed at all, chunks included, is `cached_tokens`.
    exact_tokens: context tokens that were not computed and whose entries are full prefill's: those
        of chunks in ``prefix_tokens``, and of caches made behind all that stands before them.
    found: chunks that were recognised in the prompt, with or without a cache. Each is either
        reused, computed now, or (all others) computed with the rest of the prompt, as full prefill
        does; a chunk that stands in two places counts twice.
    reused: chunks answered, at least in part, from KV entries that were there before: those of
        their cache, or of an earlier prompt with the same beginning.
    computed_now: chunks that were computed as chunks for this prompt, which later prompts find:
        while it waited, or by an announcement of which it is the first prompt (`Engine.announce`).
        If full prefill was faster then, such a chunk was computed twice.
    chunk_misses: reason -> chunks without a usable cache when the prompt came (an announcement's
        have one).
    missed_tokens: reason -> tokens of the prompt that are in such chunks and were computed with it.
    bytes_read: bytes read from chunk caches, headers and scoring data included.
    kv_bytes: working cache that the first token read, before any eviction; full_kv_bytes: what
        full prefill would hold.
    decode_kv_bytes: working cache at the end of the answer: grown by its tokens, or shrunk.
    probe_s, select_s, load_s, blend_s: seconds of each stage, load_s being all reading (for a
        GPU, what is read before a pass: the rest is read during probe_s and blend_s), blend_s
        with eviction.
    wait_s: from when the prompt was read until the model was free for its first pass.
    ttft_s: from the call to the first token, waiting and reading included. announce_s: before that,
        in announcements: their part for the chunks of this prompt that they computed.
    decode_tokens_per_s: tokens after the first, per second of the steps that computed them, which
        other answers may have shared; 0 with one token.
    """

    method: str
    ran: str
    eviction: str | None
    model: str
    prompt_tokens: int
    context_tokens: int
    prefix_tokens: int
    kept_ratio: float
    recompute_ratio: float
    uncached_tokens: int
    exact_tokens: int
    found: int
    reused: int
    computed_now: int
    chunk_misses: Mapping[str, int]
    missed_tokens: Mapping[str, int]
    bytes_read: int
    kv_bytes: int
    full_kv_bytes: int
    decode_kv_bytes: int
    probe_s: float
    select_s: float
    load_s: float
    blend_s: float
    announce_s: float
    wait_s: float
    ttft_s: float
    completion_tokens: int
    decode_tokens_per_s: float

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for it: held from before, in a cache or in memory.

        A mean over layers, as methods compute other tokens at each.
        """
        computed = self.uncached_tokens + self.recompute_ratio * self.context_tokens
        return max(0, round(self.prompt_tokens - computed))

    def __str__(self) -> str:
        """What a reader asks first: what ran, what it spared, and how long it took."""
        ran = self.ran if self.ran == self.method else f"{self.method}, which ran {self.ran}"
        misses = ", ".join(f"{n} {reason}" for reason, n in sorted(self.chunk_misses.items()))
        return (
            f"{ran}: {self.reused} of {self.found} chunks reused"
            f"{f' (missed: {misses})' if misses else ''}, {self.cached_tokens} of "
            f"{self.prompt_tokens} prompt tokens not computed, first token after "
            f"{self.ttft_s:.2f} s, {self.completion_tokens} tokens"
        )

    @property
    def line(self) -> str:
        """The figures that say most, on one line for a log; no text of anybody."""
        misses = ",".join(starmap("{}:{}".format, sorted(self.chunk_misses.items())))
        return (
            f"model={self.model} method={self.method} ran={self.ran} "
            f"prompt_tokens={self.prompt_tokens} completion_tokens={self.completion_tokens} "
            f"found={self.found} reused={self.reused} computed_now={self.computed_now} "
            f"misses={misses or 'none'} wait_s={self.wait_s:.3f} ttft_s={self.ttft_s:.3f} "
            f"bytes_read={self.bytes_read}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self) | {
            "chunk_misses": dict(self.chunk_misses),
            "missed_tokens": dict(self.missed_tokens),
        }


@dataclass
class Stopwatch:
    """Seconds spent in each stage of a request, which do not overlap, and when that was.

    On a GPU a stage counts until its work is launched; the first one that waits for the device
    counts what came before.
    """

    seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    stages: list[Stage] = field(default_factory=list)
    bytes_lost: int = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[stage] += ended - began
            self.stages.append(Stage(name=stage, began=began, ended=ended))


def report_of(
    model: Model,
    resolved: Resolved,
    layout: Layout,
    cache: WorkingCache,
    plan: PassPlan,
    clock: Stopwatch,
    *,
    method: str,
    ran: str,
    eviction: Eviction | None,
    n_held: int,
) -> Report:
    """The figures of a first token, after the pass of ``plan`` over ``layout``.

    n_held: tokens that were taken from memory.
    """
    chunks, spent, n_tokens = resolved.chunks, clock.seconds, len(resolved.token_ids)
    n_context = n_in_memory = computed_now = 0
    missed = Counter[str]()
    is_of_chunk = torch.zeros(n_tokens, dtype=torch.bool)
    # chunks of which memory holds entries, and those in the layout: whether their cache is new
    in_memory, is_new = set[int](), dict[int, bool]()
    computed = 0.0  # tokens of chunks, mean over layers
    for number, chunk in enumerate(chunks):
        n_of = sum(len(range(run.position, min(n_held, run.span.stop))) for run in chunk.runs)
        n_context += chunk.n_tokens
        n_in_memory += n_of
        computed_now += chunk.computed_now
        computed += n_of * chunk.computed_now
        if n_of and not chunk.computed_now:
            in_memory.add(number)
        if chunk.stored is None and chunk.miss is not None:
            missed[chunk.miss] += chunk.n_tokens
        if chunk.stored is not None and n_of < chunk.n_tokens and layout.n_chunks:
            is_new[number] = chunk.computed_now
        for run in chunk.runs:
            is_of_chunk[run.position : run.span.stop] = True
    stays = layout.uncached.repeat(model.n_layers, 1)
    stays[:, layout.context_positions] |= plan.kept[:, layout.block_of_token]
    kept = 0.0  # tokens of chunks that a step of the answer attends to
    for layer, of_layer in enumerate(stays):
        kept += cache.attended(layer, is_of_chunk[of_layer])
    kept /= model.n_layers  # only here, so that all of it is 1 and no more
    # the last token is computed whatever it is of
    again = plan.computed | layout.uncached[layout.context_positions]
    made_now = torch.tensor(list(is_new.values()), dtype=torch.bool)
    computed += int((again | made_now[layout.chunk_of_token]).sum()) / model.n_layers
    computed += n_context - n_in_memory - layout.n_context  # with the prompt, without a cache
    uses_cache = torch.zeros_like(made_now)
    uses_cache[layout.block_chunk[plan.blocks.any(0)]] = True
    # what is left out was not computed either: the cache has told that it is not needed
    uses_cache[layout.chunk_of_token[~again.all(0)]] = True
    n_exact = n_in_memory + int((layout.exact[layout.chunk_of_token] & ~again.any(0)).sum())
    used = [number for number, uses in zip(is_new, (uses_cache & ~made_now).tolist(), strict=True)
            if uses]  # fmt: skip
    reused = len(in_memory.union(used))
    bytes_read = clock.bytes_lost
    for stored in set(resolved.opened):
        bytes_read += stored.bytes_read
    return Report(
        method=method, ran=ran, eviction=None if eviction is None else eviction.name,
        model=model.name, prompt_tokens=n_tokens, context_tokens=n_context, prefix_tokens=n_held,
        kept_ratio=kept / n_context if n_context else 1.0,
        recompute_ratio=computed / n_context if n_context else 0.0,
        uncached_tokens=n_tokens - n_context - (n_held - n_in_memory), exact_tokens=n_exact,
        found=len(chunks), reused=reused, computed_now=computed_now,
        chunk_misses=dict(resolved.misses), missed_tokens=dict(missed),
        bytes_read=bytes_read, kv_bytes=cache.prompt_bytes,
        full_kv_bytes=n_tokens * model.token_kv_bytes, decode_kv_bytes=cache.kv_bytes,
        probe_s=spent["probe"], select_s=spent["select"], load_s=spent["load"],
        blend_s=spent["blend"], announce_s=0.0, wait_s=0.0, ttft_s=0.0, completion_tokens=0,
        decode_tokens_per_s=0.0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Total:
    """What several answers cost together. A field that `Report` has too is its sum, but for these.

    answers: how many. ran: what each came to -> answers. cached_tokens: `Report.cached_tokens`.
    kept_ratio, recompute_ratio: over the context tokens of all answers; 1 and 0 without any.
    ttft_s and the seconds of stages: added up, which is more than what a clock showed if answers
        were computed at once, or waited for each other.
    decode_s: seconds of all tokens after the first ones, added up likewise. decode_tokens_per_s:
        those tokens a second; 0 without any.

    A chunk that stands in the prompts of several answers counts in each.
    """

    answers: int
    ran: Mapping[str, int]
    prompt_tokens: int
    context_tokens: int
    prefix_tokens: int
    cached_tokens: int
    kept_ratio: float
    recompute_ratio: float
    uncached_tokens: int
    exact_tokens: int
    found: int
    reused: int
    computed_now: int
    chunk_misses: Mapping[str, int]
    bytes_read: int
    probe_s: float
    select_s: float
    load_s: float
    blend_s: float
    announce_s: float
    wait_s: float
    ttft_s: float
    decode_s: float
    completion_tokens: int
    decode_tokens_per_s: float

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Total:
        """The total of these."""
        each = list(reports)
        sums = {name: sum(getattr(report, name) for report in each) for name in _SUMS}
        n_context = sums["context_tokens"]
        kept = sum(report.kept_ratio * report.context_tokens for report in each)
        computed = sum(report.recompute_ratio * report.context_tokens for report in each)
        decoded = [
            (report.completion_tokens - 1, report.decode_tokens_per_s)
            for report in each if report.decode_tokens_per_s
        ]  # fmt: skip
        decode_s = sum(n / per_s for n, per_s in decoded)
        return cls(
            answers=len(each),
            ran=dict(Counter(report.ran for report in each)),
            kept_ratio=kept / n_context if n_context else 1.0,
            recompute_ratio=computed / n_context if n_context else 0.0,
            chunk_misses=dict(sum((Counter(report.chunk_misses) for report in each), Counter())),
            decode_s=decode_s,
            decode_tokens_per_s=sum(n for n, _ in decoded) / decode_s if decode_s else 0.0,
            **sums,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


_SUMS = (
    "prompt_tokens", "context_tokens", "prefix_tokens", "cached_tokens", "uncached_tokens", "found",
    "exact_tokens", "reused", "computed_now", "bytes_read", "probe_s", "select_s", "load_s",
    "blend_s", "announce_s", "wait_s", "ttft_s", "completion_tokens",
)  # fmt: skip


class Reports(list[Report]):
    """Reports in the order in which their answers ended."""

    @property
    def total(self) -> Total:
        """What those that are there by now come to."""
        return Total.of(self)


COLLECTORS: ContextVar[tuple[Reports, ...]] = ContextVar("samkv_reports", default=())
"""Those that an answer which begins here reports to."""


@contextmanager
def collect_reports() -> Iterator[Reports]:
    """Collects the report of every answer that begins in the block, of any engine.

        with collect_reports() as reports:
            response = query_engine.query("Who?")
        cost = reports.total  # .found, .reused, .ttft_s, ...

    An answer reports when it ends or is closed. Read streamed ones in the block: frameworks may
    not call the model before.
    What the block calls is covered through all of LangChain and LlamaIndex: asynchronous tasks, and
    their threads, which take the context of their caller along. A thread of one's own does not:
    give it ``contextvars.copy_context().run``. Blocks may be nested; both get the report then.
    """
    reports = Reports()
    COLLECTORS.set((*COLLECTORS.get(), reports))
    try:
        yield reports
    finally:
        # not by the token of `set`: an asynchronous generator may leave in another context
        COLLECTORS.set(tuple(each for each in COLLECTORS.get() if each is not reports))

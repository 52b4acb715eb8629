"""What answers cost: a report of each, with the same fields for every method, and totals."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
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
    """A stage of an answer: its begin and end by `time.perf_counter`."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of one answer.

    method, eviction: names; None without eviction. ran: what was done: the method's own name,
        ``recompute`` if the whole prompt was computed, ``prefix`` if all of it was computed except
        a prefix that an earlier prompt left in memory.
    prompt_tokens: of the whole prompt. context_tokens: those in runs of at least 16 that are a
        chunk's; all others are computed as text.
    prefix_tokens: first tokens that were taken from memory, where an earlier prompt with the same
        prefix left them: up to the first chunk, and with ``prefix`` in chunks too.
    kept_ratio: share of the context tokens that the answer attends to after its first token,
        mean over layers and key-value heads; with quest, those that one step attends to.
    recompute_ratio: share of the context tokens that were computed, mean over layers. Chunks that
        are ``computed_now``, or have no usable cache, count as computed in full.
    uncached_tokens: tokens outside chunks that were computed: all but those of ``prefix_tokens``.
    exact_tokens: context tokens that were not computed and equal full prefill's: those of chunks in
        ``prefix_tokens``, and of caches computed behind all that precedes them.
    found: chunks recognised in the prompt, with or without a cache. Each is reused, computed now,
        or (all others) computed with the rest of the prompt, as full prefill does. A chunk that
        occurs twice counts twice.
    reused: chunks that were answered, at least in part, from KV entries that existed before, in
        their cache or in memory.
    computed_now: chunks that were computed as chunks for this prompt, and stored for later ones,
        either while it waited or by an announcement that it is the first to use
        (`Engine.announce`). If full prefill was faster then, the chunk was computed twice.
    chunk_misses: reason -> chunks that had no usable cache when the prompt came. What an
        announcement computed has one.
    bytes_read: read from chunk caches, headers and scoring data included.
    kv_bytes: KV entries that the first token read, before any eviction; full_kv_bytes: those of
        full prefill; decode_kv_bytes: those held at the end of the answer.
    probe_s, select_s, load_s, blend_s: seconds of each stage. load_s is all reading (on a GPU, only
        what is read before a pass: the rest overlaps with probe_s and blend_s). blend_s includes
        eviction.
    wait_s: from the end of reading the prompt until the model was free for it.
    ttft_s: from the call to the first token, waiting and reading included. announce_s: before the
        call, in announcements, for chunks of this prompt.
    decode_tokens_per_s: tokens after the first, per second of the steps that computed them, which
        other answers may have shared; 0 with one token.
    tokens_per_step: tokens after the first, per step of the model: above 1 where drafted tokens
        were right; 0 with one token.
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
    tokens_per_step: float

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: taken from a cache or from memory.

        A mean over layers, as a method may compute different tokens at each.
        """
        computed = self.uncached_tokens + self.recompute_ratio * self.context_tokens
        return max(0, round(self.prompt_tokens - computed))

    def __str__(self) -> str:
        """What ran, what was reused, and how long it took."""
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
        """The most telling figures on one line, for a log; without any text of the prompt."""
        misses = ",".join(f"{reason}:{n}" for reason, n in sorted(self.chunk_misses.items()))
        return (
            f"model={self.model} method={self.method} ran={self.ran} "
            f"prompt_tokens={self.prompt_tokens} completion_tokens={self.completion_tokens} "
            f"found={self.found} reused={self.reused} computed_now={self.computed_now} "
            f"misses={misses or 'none'} wait_s={self.wait_s:.3f} ttft_s={self.ttft_s:.3f} "
            f"bytes_read={self.bytes_read}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


@dataclass
class Stopwatch:
    """Seconds of each stage of a request, which do not overlap, and when it ran.

    On a GPU a stage ends when its work is launched; the next stage that waits for the device
    includes the rest. bytes_lost: read from caches that failed.
    """

    stages: list[Stage] = field(default_factory=list)
    bytes_lost: int = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages.append(Stage(name=stage, began=began, ended=time.perf_counter()))


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
    """The report of a first token, after the pass of ``plan`` over ``layout``.

    n_held: first tokens that were taken from memory.
    """
    chunks, n_tokens = resolved.chunks, len(resolved.token_ids)
    spent: defaultdict[str, float] = defaultdict(float)
    for stage in clock.stages:
        spent[stage.name] += stage.ended - stage.began
    n_context, n_in_memory = resolved.n_context, 0
    is_of_chunk = torch.zeros(n_tokens, dtype=torch.bool)
    reused = set[int]()  # chunks, by their number in the prompt
    is_new = dict[int, bool]()  # chunks of the layout: whether their cache was computed now
    computed = 0.0  # tokens of chunks, mean over layers
    for number, chunk in enumerate(chunks):
        n_of = 0
        for run in chunk.runs:
            n_of += len(range(run.position, min(n_held, run.span.stop)))
            is_of_chunk[run.position : run.span.stop] = True
        n_in_memory += n_of
        if chunk.computed_now:
            computed += n_of
        elif n_of:
            reused.add(number)
        if chunk.stored is not None and n_of < chunk.n_tokens and layout.n_chunks:
            is_new[number] = chunk.computed_now
    stays = layout.uncached.repeat(model.n_layers, 1)
    stays[:, layout.context_positions] |= plan.kept[:, layout.block_of_token]
    kept = 0.0
    for layer, of_layer in enumerate(stays):
        kept += cache.attended(layer, is_of_chunk[of_layer])
    kept /= model.n_layers  # divided once, so that all of the context is exactly 1
    # the last token of a prompt is always computed
    again = plan.computed | layout.uncached[layout.context_positions]
    made_now = torch.tensor(list(is_new.values()), dtype=torch.bool)
    computed += int((again | made_now[layout.chunk_of_token]).sum()) / model.n_layers
    computed += n_context - n_in_memory - layout.n_context  # with the prompt, without a cache
    n_exact = n_in_memory + int((layout.exact[layout.chunk_of_token] & ~again.any(0)).sum())
    # reused: its entries are read, or its cache has told that tokens can be left out
    uses_cache = torch.zeros_like(made_now)
    uses_cache[layout.block_chunk[plan.blocks.any(0)]] = True
    uses_cache[layout.chunk_of_token[~again.all(0)]] = True
    for (number, is_new_one), uses in zip(is_new.items(), uses_cache.tolist(), strict=True):
        if uses and not is_new_one:
            reused.add(number)
    return Report(
        method=method, ran=ran, eviction=None if eviction is None else eviction.name,
        model=model.name, prompt_tokens=n_tokens, context_tokens=n_context, prefix_tokens=n_held,
        kept_ratio=kept / n_context if n_context else 1.0,
        recompute_ratio=computed / n_context if n_context else 0.0,
        uncached_tokens=n_tokens - n_context - (n_held - n_in_memory), exact_tokens=n_exact,
        found=len(chunks), reused=len(reused),
        computed_now=sum(chunk.computed_now for chunk in chunks),
        chunk_misses=dict(resolved.misses),
        bytes_read=clock.bytes_lost + sum(stored.bytes_read for stored in set(resolved.opened)),
        kv_bytes=cache.prompt_bytes, full_kv_bytes=n_tokens * model.token_kv_bytes,
        decode_kv_bytes=cache.kv_bytes,
        probe_s=spent["probe"], select_s=spent["select"], load_s=spent["load"],
        blend_s=spent["blend"], announce_s=0.0, wait_s=0.0, ttft_s=0.0, completion_tokens=0,
        decode_tokens_per_s=0.0, tokens_per_step=0.0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Total:
    """What several answers cost together.

    A field that `Report` has too is a sum, except for the ratios.

    answers: how many. ran: what was done -> answers. cached_tokens: `Report.cached_tokens`.
    kept_ratio, recompute_ratio: over the context tokens of all answers; 1 and 0 without any.
    decode_s: seconds of the tokens after the first. decode_tokens_per_s: those tokens per second; 0
    without any.

    Seconds are sums: more than a clock showed if answers were computed at once, or waited for each
    other. A chunk counts in each prompt that contains it.
    """

    answers: int
    ran: Mapping[str, int]
    prompt_tokens: int
    context_tokens: int
    cached_tokens: int
    kept_ratio: float
    recompute_ratio: float
    found: int
    reused: int
    computed_now: int
    chunk_misses: Mapping[str, int]
    bytes_read: int
    announce_s: float
    wait_s: float
    ttft_s: float
    decode_s: float
    completion_tokens: int
    decode_tokens_per_s: float

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Total:
        """The total of these reports."""
        each = list(reports)
        sums = {name: sum(getattr(report, name) for report in each) for name in _SUMS}
        n_context = sums["context_tokens"]
        kept = sum(report.kept_ratio * report.context_tokens for report in each)
        computed = sum(report.recompute_ratio * report.context_tokens for report in each)
        decoded, decode_s = 0, 0.0
        for report in each:
            if report.decode_tokens_per_s:
                decoded += report.completion_tokens - 1
                decode_s += (report.completion_tokens - 1) / report.decode_tokens_per_s
        return cls(
            answers=len(each),
            ran=dict(Counter(report.ran for report in each)),
            kept_ratio=kept / n_context if n_context else 1.0,
            recompute_ratio=computed / n_context if n_context else 0.0,
            chunk_misses=dict(sum((Counter(report.chunk_misses) for report in each), Counter())),
            decode_s=decode_s,
            decode_tokens_per_s=decoded / decode_s if decode_s else 0.0,
            **sums,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


_SUMS = (
    "prompt_tokens", "context_tokens", "cached_tokens", "found", "reused", "computed_now",
    "bytes_read", "announce_s", "wait_s", "ttft_s", "completion_tokens",
)  # fmt: skip


class Reports(list[Report]):
    """Reports in the order in which their answers ended."""

    @property
    def total(self) -> Total:
        """The total of the reports so far."""
        return Total.of(self)


COLLECTORS: ContextVar[tuple[Reports, ...]] = ContextVar("samkv_reports", default=())
"""The `collect_reports` blocks that an answer which begins here reports to."""


@contextmanager
def collect_reports() -> Iterator[Reports]:
    """Collects the report of every answer that begins in the block, of any engine.

        with collect_reports() as reports:
            response = query_engine.query("Who?")
        cost = reports.total  # .found, .reused, .ttft_s, ...

    An answer reports when it ends or is closed. Read streamed answers inside the block: frameworks
    may not call the model before.
    All that the block calls through LangChain and LlamaIndex is covered: asynchronous tasks, and
    their threads, which inherit the caller's context. A thread of your own does not: run it with
    ``contextvars.copy_context().run``. Of nested blocks each gets the report.
    """
    reports = Reports()
    COLLECTORS.set((*COLLECTORS.get(), reports))
    try:
        yield reports
    finally:
        # not with the token of `set`: an asynchronous generator may leave in another context
        COLLECTORS.set(tuple(each for each in COLLECTORS.get() if each is not reports))

"""What answers cost: a report of each, with the same fields for every method, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of an answer: its begin and end by `time.perf_counter`."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of one answer.

    method, eviction: names; None without eviction. ran: what the engine did: the method's own name,
        of ``auto`` the method that it chose, ``samkv-guided`` or ``epic``; ``recompute`` if it
        used no cache of a chunk, ``prefix`` if it computed all but the cached prefix. A cached
        prefix is not computed in either case.
    prompt_tokens: of the whole prompt. context_tokens: the tokens of chunks, in runs of at least
        16. All others are computed as text.
    prefix_tokens: the cached prefix: first tokens whose entries were in memory, from an earlier
        prompt or answer. A follow-up takes all that its conversation left, chunks and answers
        included. Any other prompt takes the tokens before its first chunk; if ``ran`` is
        ``prefix``, also exact tokens in chunks.
    kept_ratio: share of the context tokens that the answer attends to after its first token,
        mean over layers and key-value heads; in one step, if an eviction drops no entries.
    recompute_ratio: share of the context tokens that were computed, mean over layers. Chunks that
        are ``computed_now``, or have no usable cache, count as computed in full.
    uncached_tokens: computed tokens outside chunks: all that are not in the cached prefix.
    exact_tokens: context tokens that were not computed, and whose entries equal full prefill's:
        exact ones in the cached prefix, and those of chunks with an exact cache.
    found: chunks recognised in the prompt, with or without a cache; one that occurs twice counts
        twice. Each is counted by one of the next three fields, or by ``whole_chunks``.
    reused: chunks whose cache was in the store before, and was used at least in part.
    prefix_chunks: other chunks that lie in the cached prefix, wholly or in part.
    computed_now: chunks that were computed as chunks for this prompt, and stored for later ones,
        while it waited or by an announcement (`Engine.announce`). If full prefill was faster after
        that, the chunk was computed twice.
    chunk_misses: reason -> chunks that had no usable cache when the prompt came.
    bytes_read: read from chunk caches, headers and scoring data included.
    kv_bytes: KV entries that the first token read, before any eviction; full_kv_bytes: those of
        full prefill; decode_kv_bytes: those in memory at the end of the answer.
    stays: whether the entries of prompt and answer stay in memory, so that a follow-up computes its
        new tokens only. With an eviction, or a method that selects blocks or has an attention of
        its own, only the prompt's beginning stays; without room (``prefix_bytes``), no entries.
    probe_s, select_s, load_s, blend_s: seconds of each stage, including other answers that ran
        between its layers (`Scheduler`). load_s covers all reading; on a GPU only the reading
        before a pass, because the rest overlaps with probe_s and blend_s. blend_s includes
        eviction.
    wait_s: from the end of reading the prompt until the model was free for it.
    ttft_s: from the call to the first token, waiting and reading included. announce_s: seconds that
        announcements of the prompt's chunks took, before the call.
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
    prefix_chunks: int
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
    stays: bool = False
    announce_s: float = 0.0
    wait_s: float = 0.0
    ttft_s: float = 0.0
    completion_tokens: int = 0
    decode_tokens_per_s: float = 0.0
    tokens_per_step: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: taken from a cache or from memory.

        A mean over layers, as a method may compute different tokens at each.
        """
        computed = self.uncached_tokens + self.recompute_ratio * self.context_tokens
        return max(0, round(self.prompt_tokens - computed))

    @property
    def whole_chunks(self) -> int:
        """Found chunks that were computed with the rest of the prompt.

        They had no usable cache, full prefill was faster, or the method computed all their tokens.
        """
        return self.found - self.reused - self.prefix_chunks - self.computed_now

    def __str__(self) -> str:
        """What ran, what was reused, and how long it took."""
        ran = self.ran if self.ran == self.method else f"{self.method}, which ran {self.ran}"
        misses = ", ".join(f"{n} {reason}" for reason, n in sorted(self.chunk_misses.items()))
        counted = {
            "from memory": self.prefix_chunks, "computed and stored": self.computed_now,
            "computed with the prompt": self.whole_chunks if self.reused else 0,
        }  # fmt: skip
        others = "".join(f", {n} {what}" for what, n in counted.items() if n)
        return (
            f"{ran}: {self.reused} of {self.found} chunks reused{others}"
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
            f"prefix_tokens={self.prefix_tokens} stays={self.stays} "
            f"found={self.found} reused={self.reused} prefix_chunks={self.prefix_chunks} "
            f"computed_now={self.computed_now} "
            f"misses={misses or 'none'} wait_s={self.wait_s:.3f} ttft_s={self.ttft_s:.3f} "
            f"bytes_read={self.bytes_read}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Total:
    """What several answers cost together.

    A field that `Report` has too is a sum, except for the ratios.

    ran: `Report.ran` -> number of answers. kept_ratio, recompute_ratio: over the context tokens of
    all answers; 1 and 0 without any. decode_s, decode_tokens_per_s: of the tokens after the first.

    Seconds are sums. They exceed the time on a clock if answers were computed together, or waited
    for each other. A chunk counts in each prompt that contains it.
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
    prefix_chunks: int
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
    "prompt_tokens", "context_tokens", "cached_tokens", "found", "reused", "prefix_chunks",
    "computed_now", "bytes_read", "announce_s", "wait_s", "ttft_s", "completion_tokens",
)  # fmt: skip


class Reports(list[Report]):
    """Reports in the order in which their answers ended."""

    @property
    def total(self) -> Total:
        """The total of the reports so far."""
        return Total.of(self)

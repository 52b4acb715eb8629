"""What one answer cost, the same fields for every method, and when its stages were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
    probe_s, select_s, load_s, blend_s: seconds of each stage, load_s being all reading, blend_s
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
        return asdict(self) | {
            "chunk_misses": dict(self.chunk_misses),
            "missed_tokens": dict(self.missed_tokens),
        }

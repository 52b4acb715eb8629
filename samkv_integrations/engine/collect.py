"""The reports of all answers of one query, and what they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from samkv_integrations.engine.report import Report


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
        misses: Counter[str] = Counter()
        for report in each:
            misses.update(report.chunk_misses)
        sums = {name: sum(getattr(report, name) for report in each) for name in _SUMS}
        n_context = sums["context_tokens"]
        kept = sum(report.kept_ratio * report.context_tokens for report in each)
        computed = sum(report.recompute_ratio * report.context_tokens for report in each)
        decoded = [report for report in each if report.decode_tokens_per_s]
        n_decoded = sum(report.completion_tokens - 1 for report in decoded)
        decode_s = sum(
            (report.completion_tokens - 1) / report.decode_tokens_per_s for report in decoded
        )
        return cls(
            answers=len(each),
            ran=dict(Counter(report.ran for report in each)),
            kept_ratio=kept / n_context if n_context else 1.0,
            recompute_ratio=computed / n_context if n_context else 0.0,
            chunk_misses=dict(misses),
            decode_s=decode_s,
            decode_tokens_per_s=n_decoded / decode_s if decode_s else 0.0,
            **sums,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


_SUMS = (
    "prompt_tokens", "context_tokens", "prefix_tokens", "cached_tokens", "uncached_tokens", "found",
    "reused", "computed_now", "bytes_read", "probe_s", "select_s", "load_s", "blend_s",
    "announce_s", "wait_s", "ttft_s", "completion_tokens",
)  # fmt: skip


class Reports(list[Report]):
    """Reports in the order in which their answers ended."""

    @property
    def total(self) -> Total:
        """What those that are there by now come to."""
        return Total.of(self)


_COLLECTORS: ContextVar[tuple[Reports, ...]] = ContextVar("samkv_reports", default=())


def collectors() -> tuple[Reports, ...]:
    """Those that an answer which begins here reports to."""
    return _COLLECTORS.get()


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
    _COLLECTORS.set((*_COLLECTORS.get(), reports))
    try:
        yield reports
    finally:
        # not by the token of `set`: an asynchronous generator may leave in another context
        _COLLECTORS.set(tuple(each for each in _COLLECTORS.get() if each is not reports))

"""Figures for Prometheus. No label holds a text, a key, or the name of a tenant."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from samkv_integrations.engine.report import Report
from samkv_integrations.engine.scheduler import Scheduler

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class Metrics:
    """What a server counts, apart from other servers of its process."""

    def __init__(self, scheduler: Scheduler) -> None:
        own = self._registry = CollectorRegistry()
        ProcessCollector(registry=own)  # memory, file descriptors, CPU
        self._requests = Counter(
            "samkv_requests", "Requests by path and status.", ("path", "status"), registry=own
        )
        self._prompt = Counter(
            "samkv_prompt_tokens", "Tokens of prompts, by where they came from.", ("source",),
            registry=own,
        )  # fmt: skip
        self._generated = Counter("samkv_generated_tokens", "Tokens of answers.", registry=own)
        self._chunks = Counter(
            "samkv_chunks", "Chunks of prompts, by what became of them.", ("outcome",), registry=own
        )
        self._read = Counter("samkv_read_bytes", "Bytes read from chunk caches.", registry=own)
        self._first = Histogram(
            "samkv_time_to_first_token_seconds", "From the request to the first token.",
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._wait = Histogram(
            "samkv_wait_seconds", "The part of it until the model was free.",
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._per_token = Histogram(
            "samkv_time_per_output_token_seconds", "Of answers of two tokens and more.",
            buckets=(0.005, *_SECONDS), registry=own,
        )  # fmt: skip
        for name, help_, value in (
            ("samkv_requests_running", "Answers that have begun.", lambda: scheduler.load.running),
            ("samkv_requests_waiting", "Answers that have not.", lambda: scheduler.load.waiting),
            ("samkv_kv_bytes", "KV that those may come to.", lambda: scheduler.load.kv_bytes),
        ):
            Gauge(name, help_, registry=own).set_function(value)

    def count_request(self, path: str, status: int) -> None:
        """A request is over. path: the route, without what stands for a parameter."""
        self._requests.labels(path, str(status)).inc()

    def count_answer(self, report: Report) -> None:
        """An answer is over, complete or not."""
        computed = report.prompt_tokens - report.cached_tokens
        from_chunks = report.cached_tokens - report.prefix_tokens
        for source, n_tokens in (
            ("chunks", from_chunks), ("prefix", report.prefix_tokens), ("computed", computed),
        ):  # fmt: skip
            self._prompt.labels(source).inc(max(0, n_tokens))
        self._generated.inc(report.completion_tokens)
        for outcome, n_chunks in (
            ("reused", report.reused), ("computed_now", report.computed_now),
            ("missed", sum(report.chunk_misses.values())),
        ):  # fmt: skip
            self._chunks.labels(outcome).inc(n_chunks)
        self._read.inc(report.bytes_read)
        self._first.observe(report.ttft_s)
        self._wait.observe(report.wait_s)
        if report.decode_tokens_per_s:
            self._per_token.observe(1 / report.decode_tokens_per_s)

    @property
    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)

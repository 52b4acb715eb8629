"""OpenTelemetry: a span and metrics of each answer, where its API is installed.

No text of a prompt or an answer is sent, nor the message of an error, which may quote them. Names
that begin with ``gen_ai.`` follow OpenTelemetry's conventions, which are not stable yet; they are
spelled out, because the constants of the Python package are deprecated.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from samkv_integrations import release
from samkv_integrations.report import Report, Stage
from samkv_integrations.serving.listeners import AnswerEnded

SCOPE = "samkv_integrations"
"""The instrumentation scope of all spans and metrics."""

NAME = "samkv"
"""Our name as a provider, and in `DISABLED`."""

DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
"""OpenTelemetry's environment variable: names that send nothing, separated by commas."""

Attributes = dict[str, Any]

_SECONDS = tuple(0.01 * 2**power for power in range(14))
_TOKENS = tuple(float(4**power) for power in range(14))
_METRICS: Mapping[str, tuple[str, str, Sequence[float] | None]] = {
    "gen_ai.client.operation.duration": ("s", "Duration of whole answers.", _SECONDS),
    "gen_ai.client.operation.time_to_first_chunk": (
        "s", "From the call to the first token.", _SECONDS,
    ),
    "samkv.wait": ("s", "The part of it before the model was free.", _SECONDS),
    "gen_ai.client.token.usage": ("{token}", "Tokens of a prompt, or of an answer.", _TOKENS),
    "samkv.prompt.tokens": ("{token}", "Tokens of prompts, by source.", None),
    "samkv.chunks": ("{chunk}", "Chunks of prompts, by outcome.", None),
    "samkv.bytes_read": ("By", "Bytes read from chunk caches.", None),
}  # fmt: skip
"""Unit, description and bounds; None for a counter."""

_FIGURES = {
    "gen_ai.response.model": "model",
    "gen_ai.response.time_to_first_chunk": "ttft_s",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "samkv.chunk.found": "found",
    "samkv.chunk.hits": "reused",
    "samkv.chunk.computed_now": "computed_now",
    **{
        f"samkv.{name}": name
        for name in (
            "method", "ran", "kept_ratio", "recompute_ratio", "context_tokens", "prefix_tokens",
            "prefix_chunks", "bytes_read", "kv_bytes", "announce_s", "decode_tokens_per_s",
        )
    },
}  # fmt: skip
"""Attribute of a span -> field of the report."""


class _Telemetry:
    """The API and our instruments. A provider that is set later is used, too."""

    def __init__(self) -> None:
        from opentelemetry import context, metrics, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api, self.context = trace, context
        self.propagator = TraceContextTextMapPropagator()
        self.tracer = trace.get_tracer(SCOPE, release.version())
        meter = metrics.get_meter(SCOPE, release.version())
        self.record: dict[str, Callable[..., None]] = {}
        for name, (unit, about, bounds) in _METRICS.items():
            self.record[name] = (
                meter.create_counter(name, unit, about).add
                if bounds is None
                else meter.create_histogram(
                    name, unit, about, explicit_bucket_boundaries_advisory=bounds
                ).record
            )


@cache
def _telemetry() -> _Telemetry | None:
    """None if the API is not installed, or too old."""
    try:
        return _Telemetry()
    except (ImportError, TypeError):  # an older API, whose histograms take no bounds
        return None


def _listening() -> _Telemetry | None:
    """The API that answers are sent to; None if it is not installed, or switched off."""
    disabled = os.environ.get(DISABLED, "").replace(" ", "").split(",")
    return None if NAME in disabled else _telemetry()


@contextmanager
def below_caller(headers: Mapping[str, str]) -> Iterator[None]:
    """In the block, the parent of spans is the current span, or else that of ``traceparent``."""
    telemetry = _listening()
    if telemetry is None or telemetry.api.get_current_span().get_span_context().is_valid:
        yield
        return
    token = telemetry.context.attach(telemetry.propagator.extract(headers))
    try:
        yield
    finally:
        telemetry.context.detach(token)


def trace_answer(ended: AnswerEnded) -> None:
    """Send an answer as a span with its stages, and in metrics. Without the API nothing is sent.

    The parent of the span is the current span, which is the caller's.
    """
    if (telemetry := _listening()) is None:
        return
    caller, report = telemetry.context.get_current(), ended.report
    operation = "chat" if ended.is_chat else "text_completion"
    labels: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": ended.model,
    }
    # a caller that leaves is not counted as a failure
    has_failed = ended.error is not None and not isinstance(
        ended.error, asyncio.CancelledError | GeneratorExit
    )
    if has_failed:
        labels["error.type"] = type(ended.error).__qualname__
    epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)

    def ns(seconds: float) -> int:
        return epoch_ns + int(seconds * 1e9)

    span = telemetry.tracer.start_span(
        f"{operation} {ended.model}", caller, start_time=ns(ended.began),
        attributes=labels | _options_of(ended) | ({} if report is None else _figures_of(report)),
    )  # fmt: skip
    if has_failed:
        span.set_status(telemetry.api.Status(telemetry.api.StatusCode.ERROR))
    below = telemetry.api.set_span_in_context(span, caller)
    if report is not None and span.is_recording():
        decode = Stage(name="decode", began=ended.stages[-1].ended, ended=ended.ended)
        for stage in (*ended.stages, decode):
            child = telemetry.tracer.start_span(
                f"samkv.{stage.name}", below, start_time=ns(stage.began)
            )
            child.end(end_time=ns(stage.ended))
    telemetry.record["gen_ai.client.operation.duration"](ended.ended - ended.began, labels, below)
    for name, value, more in () if report is None else _points_of(report):
        telemetry.record[name](value, labels | more, below)
    span.end(end_time=ns(ended.ended))


def _options_of(ended: AnswerEnded) -> Attributes:
    """The options of an answer, and how it ended, as attributes of a span."""
    sampling, found = ended.settings.sampling, Attributes()
    found["gen_ai.request.max_tokens"] = sampling.max_new_tokens
    found["gen_ai.output.type"] = "text" if ended.settings.json_schema is None else "json"
    of_sampling = () if sampling.is_greedy else ("top_k", "top_p")
    for name in ("temperature", "seed", *of_sampling):
        if (value := getattr(sampling, name)) is not None:
            found[f"gen_ai.request.{name}"] = value
    if ended.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [ended.finish_reason]
    return found


def _figures_of(report: Report) -> Attributes:
    """The report, as attributes of a span."""
    found: Attributes = {name: getattr(report, figure) for name, figure in _FIGURES.items()}
    found["samkv.chunk.misses"] = sum(report.chunk_misses.values())
    if report.eviction is not None:
        found["samkv.eviction"] = report.eviction
    if report.chunk_misses:
        found["samkv.chunk.miss_reasons"] = sorted(report.chunk_misses)
    return found


def _points_of(report: Report) -> list[tuple[str, float, Attributes]]:
    """Name, value and labels of the metrics that a report adds to."""
    cached, prefix = report.cached_tokens, report.prefix_tokens
    missed = sum(report.chunk_misses.values())
    usage, sources = "gen_ai.client.token.usage", "samkv.prompt.tokens"
    return [
        ("gen_ai.client.operation.time_to_first_chunk", report.ttft_s, {}),
        ("samkv.wait", report.wait_s, {}),
        ("samkv.bytes_read", report.bytes_read, {}),
        (usage, report.prompt_tokens, {"gen_ai.token.type": "input"}),
        (usage, report.completion_tokens, {"gen_ai.token.type": "output"}),
        (sources, max(0, cached - prefix), {"samkv.source": "chunks"}),
        (sources, prefix, {"samkv.source": "prefix"}),
        (sources, report.prompt_tokens - cached, {"samkv.source": "computed"}),
        ("samkv.chunks", report.reused, {"samkv.outcome": "reused"}),
        ("samkv.chunks", report.prefix_chunks, {"samkv.outcome": "prefix"}),
        ("samkv.chunks", report.computed_now, {"samkv.outcome": "computed_now"}),
        ("samkv.chunks", missed, {"samkv.outcome": "missed"}),
    ]

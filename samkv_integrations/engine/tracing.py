"""What OpenTelemetry is told of each answer, where its API is installed: a span, and metrics.

Nothing here is a prompt's text, or an answer's, or an error's message, which may hold either.
Names that begin with ``gen_ai.`` are of OpenTelemetry's conventions, none of which is stable yet;
they are written out, because their constants in Python are deprecated.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from samkv_integrations import figures
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.reader import Prompt

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram, Meter

SCOPE = "samkv_integrations"
"""The instrumentation scope of all spans and metrics."""

NAME = "samkv"
"""The provider that they name, and how `DISABLED` names us."""

DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
"""A variable of OpenTelemetry's own: names of what shall tell it nothing, with commas between."""

Attributes = dict[str, str | int | float | Sequence[str]]

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(float(4**power) for power in range(14))


class Trace:
    """What one answer tells while it goes on. This one tells nobody.

    Times are of `time.perf_counter`. Any thread may call it, one at a time.
    """

    @contextmanager
    def until_asked(self) -> Iterator[None]:
        """Ends with what is raised before there is an answer to wait for."""
        try:
            yield
        except BaseException as error:
            self.end(time.perf_counter(), error=error)
            raise

    def begun(self, stages: Sequence[Stage]) -> None:
        """The first token is there, after these stages."""

    def end(
        self,
        at: float,
        *,
        report: Report | None = None,
        finish_reason: str | None = None,
        error: BaseException | None = None,
    ) -> None:
        """The answer is over; report: None if it never began."""


_NOBODY = Trace()


def begin_trace(model: str, prompt: Prompt, settings: AnswerSettings, began: float) -> Trace:
    """The trace of an answer that was asked for at ``began``, below the caller's current span."""
    telemetry = None if _is_disabled() else _telemetry()
    if telemetry is None:
        return _NOBODY
    is_text = isinstance(prompt, str | RenderedPrompt)
    asked: Attributes = {
        "gen_ai.operation.name": "text_completion" if is_text else "chat",
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": model,
    }
    return _Traced(telemetry, asked, settings, began)


@contextmanager
def below_caller(headers: Mapping[str, str]) -> Iterator[None]:
    """Spans are below that of who sent a request: the one current already, or ``traceparent``'s."""
    telemetry = None if _is_disabled() else _telemetry()
    if telemetry is None or telemetry.api.get_current_span().get_span_context().is_valid:
        yield
        return
    token = telemetry.context.attach(telemetry.propagator.extract(headers))
    try:
        yield
    finally:
        telemetry.context.detach(token)


def _is_disabled() -> bool:
    return NAME in [name.strip() for name in os.environ.get(DISABLED, "").split(",")]


@cache
def _telemetry() -> _Telemetry | None:
    """The API and our instruments; None if it is not installed, or too old."""
    try:
        return _Telemetry()
    except (ImportError, TypeError):  # histograms of older ones know no bounds
        return None


class _Telemetry:
    """What spans and metrics are made with. Providers that are set later are found, too."""

    def __init__(self) -> None:
        from opentelemetry import context, metrics, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = figures.version()
        self.api, self.context = trace, context
        self.propagator = TraceContextTextMapPropagator()
        self.tracer = trace.get_tracer(SCOPE, version)
        meter = metrics.get_meter(SCOPE, version)
        self.duration = _seconds(meter, "gen_ai.client.operation.duration", "Of whole answers.")
        self.first = _seconds(
            meter,
            "gen_ai.client.operation.time_to_first_chunk",
            "From the call to the first token.",
        )
        self.wait = _seconds(meter, "samkv.wait", "The part of it until the model was free.")
        self.tokens: Histogram = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens of a prompt, or of an answer.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )  # fmt: skip
        self.sources: Counter = meter.create_counter(
            "samkv.prompt.tokens", "{token}", "Tokens of prompts, by where they came from."
        )
        self.chunks: Counter = meter.create_counter(
            "samkv.chunks", "{chunk}", "Chunks of prompts, by what became of them."
        )
        self.read: Counter = meter.create_counter(
            "samkv.bytes_read", "By", "Bytes read from chunk caches."
        )


def _seconds(meter: Meter, name: str, help_: str) -> Histogram:
    return meter.create_histogram(name, "s", help_, explicit_bucket_boundaries_advisory=_SECONDS)


class _Traced(Trace):
    """An answer with a span."""

    def __init__(
        self, telemetry: _Telemetry, asked: Attributes, settings: AnswerSettings, began: float
    ) -> None:
        self._with, self._asked, self._began = telemetry, asked, began
        self._epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        self._first_at: float | None = None
        self._is_over = False
        self._span = telemetry.tracer.start_span(
            f"{asked['gen_ai.operation.name']} {asked['gen_ai.request.model']}",
            attributes={**asked, **_settings_of(settings)},
            start_time=self._ns(began),
        )
        self._context = telemetry.api.set_span_in_context(self._span)

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)

    def begun(self, stages: Sequence[Stage]) -> None:
        self._first_at = max((stage.ended for stage in stages), default=self._began)
        if self._span.is_recording():
            for stage in stages:
                self._stage(stage)

    def _stage(self, stage: Stage) -> None:
        child = self._with.tracer.start_span(
            f"samkv.{stage.name}", context=self._context, start_time=self._ns(stage.began)
        )
        child.end(end_time=self._ns(stage.ended))

    def end(
        self,
        at: float,
        *,
        report: Report | None = None,
        finish_reason: str | None = None,
        error: BaseException | None = None,
    ) -> None:
        if self._is_over:
            return
        self._is_over = True
        failed: Attributes = {}
        # who asked has left: that is no failure
        if error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
            failed["error.type"] = type(error).__qualname__
        if (span := self._span).is_recording():
            if self._first_at is not None:
                self._stage(Stage(name="decode", began=self._first_at, ended=at))
            if report is not None:
                span.set_attributes(_figures_of(report, finish_reason))
            if failed:
                span.set_attributes(failed)
                span.set_status(self._with.api.Status(self._with.api.StatusCode.ERROR))
        self._count(at - self._began, report, self._asked | failed)
        span.end(end_time=self._ns(at))

    def _count(self, seconds: float, report: Report | None, labels: Attributes) -> None:
        telemetry, context = self._with, self._context
        telemetry.duration.record(seconds, labels, context)
        if report is None:
            return
        telemetry.first.record(report.ttft_s, labels, context)
        telemetry.wait.record(report.wait_s, labels, context)
        telemetry.read.add(report.bytes_read, labels, context)
        for kind, n_tokens in (
            ("input", report.prompt_tokens), ("output", report.completion_tokens),
        ):  # fmt: skip
            telemetry.tokens.record(n_tokens, {**labels, "gen_ai.token.type": kind}, context)
        for source, n_tokens in _sources_of(report).items():
            telemetry.sources.add(n_tokens, {**labels, "samkv.source": source}, context)
        for outcome, n_chunks in _outcomes_of(report).items():
            telemetry.chunks.add(n_chunks, {**labels, "samkv.outcome": outcome}, context)


def _sources_of(report: Report) -> dict[str, int]:
    return {
        "chunks": max(0, report.cached_tokens - report.prefix_tokens),
        "prefix": report.prefix_tokens,
        "computed": report.prompt_tokens - report.cached_tokens,
    }


def _outcomes_of(report: Report) -> dict[str, int]:
    return {
        "reused": report.reused,
        "computed_now": report.computed_now,
        "missed": sum(report.chunk_misses.values()),
    }


def _settings_of(settings: AnswerSettings) -> Attributes:
    """What was asked for, without its texts."""
    values = settings.sampling.values
    named = {
        "gen_ai.request.max_tokens": values["max_new_tokens"],
        "gen_ai.request.temperature": values["temperature"],
        "gen_ai.request.seed": values["seed"],
    }
    if not settings.sampling.is_greedy:
        named |= {"gen_ai.request.top_k": values["top_k"], "gen_ai.request.top_p": values["top_p"]}
    found: Attributes = {name: value for name, value in named.items() if value is not None}
    found["gen_ai.output.type"] = "text" if settings.json_schema is None else "json"
    return found


def _figures_of(report: Report, finish_reason: str | None) -> Attributes:
    found: Attributes = {
        "gen_ai.response.model": report.model,
        "gen_ai.response.time_to_first_chunk": report.ttft_s,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "samkv.method": report.method,
        "samkv.ran": report.ran,
        "samkv.kept_ratio": report.kept_ratio,
        "samkv.recompute_ratio": report.recompute_ratio,
        "samkv.context_tokens": report.context_tokens,
        "samkv.prefix_tokens": report.prefix_tokens,
        "samkv.chunk.found": report.found,
        "samkv.chunk.hits": report.reused,
        "samkv.chunk.computed_now": report.computed_now,
        "samkv.chunk.misses": sum(report.chunk_misses.values()),
        "samkv.bytes_read": report.bytes_read,
        "samkv.kv_bytes": report.kv_bytes,
        "samkv.announce_s": report.announce_s,
        "samkv.decode_tokens_per_s": report.decode_tokens_per_s,
    }
    if report.eviction is not None:
        found["samkv.eviction"] = report.eviction
    if report.chunk_misses:
        found["samkv.chunk.miss_reasons"] = sorted(report.chunk_misses)
    if finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [finish_reason]
    return found

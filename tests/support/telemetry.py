"""What OpenTelemetry is told, kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SCOPE = "samkv_integrations"


@cache
def _providers() -> tuple[TracerProvider, InMemoryMetricReader, InMemoryLogRecordExporter]:
    """Those of the process, which can be set once only."""
    delta = dict.fromkeys((Counter, Histogram), AggregationTemporality.DELTA)
    reader = InMemoryMetricReader(preferred_temporality=delta)
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    logs, logger_provider = InMemoryLogRecordExporter(), LoggerProvider()
    logger_provider.add_log_record_processor(SimpleLogRecordProcessor(logs))
    _logs.set_logger_provider(logger_provider)
    return provider, reader, logs


class Told:
    """What is told while a test lasts."""

    def __init__(
        self,
        exporter: InMemorySpanExporter,
        reader: InMemoryMetricReader,
        logs: InMemoryLogRecordExporter,
    ) -> None:
        self._exporter, self._reader, self._logs = exporter, reader, logs
        self.tracer = trace.get_tracer("the caller")

    @property
    def spans(self) -> list[ReadableSpan]:
        """All that have ended, whosever they are."""
        return list(self._exporter.get_finished_spans())

    @property
    def logs(self) -> list[str]:
        """What was logged through OpenTelemetry, by whomever."""
        return [record.to_json() for record in self._logs.get_finished_logs()]

    @property
    def _ours(self) -> list[ReadableSpan]:
        found = self.spans
        ours = [
            s for s in found if s.instrumentation_scope and s.instrumentation_scope.name == SCOPE
        ]
        return sorted(ours, key=lambda span: span.start_time or 0)

    @property
    def answers(self) -> list[ReadableSpan]:
        """Spans of answers that have ended, in the order in which they began."""
        return [span for span in self._ours if not span.name.startswith("samkv.")]

    def stages(self, answer: ReadableSpan) -> list[ReadableSpan]:
        """The spans below an answer's, likewise."""
        return [span for span in self._ours if is_below(span, answer)]

    def sender_of(self, span: ReadableSpan) -> Any:
        """The context that stands above a span and is of no span that has ended; None for none."""
        by_id = {each.context.span_id: each for each in self.spans if each.context}
        parent = span.parent
        while parent is not None and parent.span_id in by_id:
            parent = by_id[parent.span_id].parent
        return parent

    def metrics(self) -> dict[str, dict[tuple[str, ...], Any]]:
        """Points since the last time: name -> values of attributes beside the model's -> point."""
        data = self._reader.get_metrics_data()
        found: dict[str, dict[tuple[str, ...], Any]] = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                if scope.scope.name == SCOPE:
                    for metric in scope.metrics:
                        found[metric.name] = {
                            _labels(p.attributes or {}): p for p in metric.data.data_points
                        }
        return found


def _labels(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    common = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
    return tuple(str(attributes[name]) for name in sorted(attributes) if name not in common)


def is_below(span: ReadableSpan, parent: Any) -> bool:
    context = parent.get_span_context()
    return span.parent is not None and (span.parent.trace_id, span.parent.span_id) == (
        context.trace_id, context.span_id,
    )  # fmt: skip


@contextmanager
def listening() -> Iterator[Told]:
    provider, reader, logs = _providers()
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    reader.get_metrics_data()  # of earlier tests
    logs.clear()
    yield Told(exporter, reader, logs)
    exporter.shutdown()  # it keeps nothing any more

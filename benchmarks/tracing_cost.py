"""What telling OpenTelemetry costs an answer: switched off, without a provider, and with the SDK's.

    python -m benchmarks.tracing_cost --rounds 200

The ways take turns on the same prompt, so that a busy machine slows down all of them. ``alone`` is
what the calls of one answer take without the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.datasets import load
from samkv_integrations import Engine
from samkv_integrations.engine.answer_settings import AnswerSettings
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.tracing import DISABLED, NAME, Trace
from samkv_integrations.figures import commit
from samkv_integrations.model import load_model
from samkv_integrations.prompt import rag_prompt

STAGES = ("read", "wait", "load", "select", "probe", "load", "select", "load", "blend")
ALONE = 2000


class Nowhere(SpanExporter):
    """Takes spans and keeps none."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def switch(is_on: bool) -> None:
    os.environ[DISABLED] = "" if is_on else NAME


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alone_us(model: str, report: Report) -> float:
    """Microseconds of the calls of one answer, the median of many."""
    settings, found = AnswerSettings.of(), []
    for _ in range(ALONE):
        began = time.perf_counter()
        told = Trace(model, "Who?", settings, began)
        told.begun([Stage(name=name, began=began, ended=began) for name in STAGES])
        told.end(began, report=report, finish_reason="stop")
        found.append(time.perf_counter() - began)
    return 1e6 * statistics.median(found)


def row(name: str, off: list[float], on: list[float], alone: float) -> dict[str, object]:
    """off, on: seconds of the answers, in turns."""
    pairs = [1e6 * (b - a) for a, b in zip(off, on, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return {
        "told": name, "answers": len(on),
        "off_ms": round(1e3 * statistics.median(off), 3),
        "on_ms": round(1e3 * statistics.median(on), 3),
        "pairs_differ_us": {"median": round(middle), "half_between": [round(low), round(high)]},
        "alone_us": round(alone, 1), "commit": commit(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1)
    args = parser.parse_args()
    question = load()[0]
    prompt = str(rag_prompt(question.question, question.documents))
    engine = Engine(load_model("builtin"), method="reuse", prefix_bytes=0)
    engine.cache_chunks(question.documents)

    def ask() -> Report:
        return engine.generate(prompt, max_new_tokens=args.tokens).report

    report = ask()
    for name in ("nobody: no provider", "the SDK: a batch exporter that drops all"):
        if name.startswith("the SDK"):
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(Nowhere()))
            trace.set_tracer_provider(provider)
            metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
        off, on = [], []
        for _ in range(args.rounds):
            switch(False)
            off.append(seconds(ask))
            switch(True)
            on.append(seconds(ask))
        print(json.dumps(row(name, off, on, alone_us(engine.model.name, report))))


if __name__ == "__main__":
    main()

"""What OpenTelemetry is told of answers: a span below the caller's, its stages, and metrics."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from samkv_integrations import Engine, Report, collect_reports
from samkv_integrations.errors import InvalidOption, Overloaded, PromptTooLong, TimedOut
from samkv_integrations.release import version
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from tests.support.models import tiny_model
from tests.support.steps import Steps
from tests.support.telemetry import Told, is_below

MARK = "zugzwang"
TEXTS = [f"The mill of {MARK} number {at} was built in 1871 by two brothers." for at in range(3)]
PROMPT = "\n\n".join(TEXTS) + f"\n\nWho built {MARK}?"
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def engine() -> Engine:
    engine = Engine(tiny_model("llama"), method="samkv-guided", block_size=8)
    engine.cache_chunks(TEXTS[:2])
    return engine


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def figures(report: Report) -> dict[str, Any]:
    """What a span says of a report, each figure by its name in the conventions or of ours."""
    return {
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
        "samkv.prefix_chunks": report.prefix_chunks,
        "samkv.chunk.found": report.found,
        "samkv.chunk.hits": report.reused,
        "samkv.chunk.computed_now": report.computed_now,
        "samkv.chunk.misses": sum(report.chunk_misses.values()),
        "samkv.bytes_read": report.bytes_read,
        "samkv.kv_bytes": report.kv_bytes,
        "samkv.announce_s": report.announce_s,
        "samkv.decode_tokens_per_s": report.decode_tokens_per_s,
    }


def test_a_span_says_what_the_report_does(engine: Engine, told: Told) -> None:
    with told.tracer.start_as_current_span("the caller") as caller:
        report = engine.generate(PROMPT, TEXTS, max_new_tokens=3, eviction="h2o").report
    (span,) = told.answers
    assert span.name == "text_completion tiny-llama" and is_below(span, caller)
    assert span.status.status_code == StatusCode.UNSET and not span.events
    assert span.instrumentation_scope and span.instrumentation_scope.version == version()
    assert report.chunk_misses == {"absent": 1}
    assert attributes(span) == figures(report) | {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "samkv",
        "gen_ai.request.model": "tiny-llama",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.output.type": "text",
        "gen_ai.response.finish_reasons": ("length",),
        "samkv.eviction": "h2o",
        "samkv.chunk.miss_reasons": ("absent",),
    }


def test_what_was_asked_for_is_in_the_span(engine: Engine, told: Told) -> None:
    engine.generate(CHAT, max_new_tokens=2, temperature=0.5, top_k=7, top_p=0.9, seed=3)
    (span,) = told.answers
    assert span.name == "chat tiny-llama" and span.parent is None
    asked = {name: value for name, value in attributes(span).items() if ".request." in name}
    assert asked == {
        "gen_ai.request.model": "tiny-llama",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
    }


def test_stages_are_below_and_within_their_answer(engine: Engine, told: Told) -> None:
    before = time.time_ns()
    report = engine.generate(PROMPT, TEXTS, max_new_tokens=3).report
    (span,) = told.answers
    stages = told.stages(span)
    names = [stage.name.removeprefix("samkv.") for stage in stages]
    assert names[:3] == ["read", "wait", "compute_chunks"] and names[-1] == "decode"
    assert {"select", "load", "blend"} <= set(names)
    ends = [span.start_time, *(stage.end_time for stage in stages)]
    for end, stage in zip(ends, stages, strict=False):  # one after the other
        assert end <= stage.start_time <= stage.end_time
    assert before <= span.start_time and stages[-1].end_time == span.end_time
    for name in ("wait", "probe", "select", "load", "blend"):
        spans = [stage for stage in stages if stage.name == f"samkv.{name}"]
        seconds = sum(stage.end_time - stage.start_time for stage in spans) / 1e9
        assert seconds == pytest.approx(getattr(report, f"{name}_s"), abs=1e-6), name


def test_no_text_is_told(engine: Engine, told: Told) -> None:
    engine.generate(PROMPT, TEXTS, max_new_tokens=2, stop=[MARK])
    engine.generate(CHAT, max_new_tokens=2)
    engine.generate(PROMPT, json_schema={"title": MARK, "type": "object"}, max_new_tokens=2)
    with pytest.raises(InvalidOption, match=MARK):
        engine.generate(PROMPT, [MARK * 9])
    assert len(told.answers) == 4
    for span in told.answers:
        assert MARK not in span.to_json()
        assert not [stage for stage in told.stages(span) if MARK in stage.to_json()]


def closed(engine: Engine) -> None:
    with engine.stream(PROMPT, max_new_tokens=3) as stream:
        next(stream)


async def cancelled(engine: Engine, steps: Steps) -> None:
    steps.hold()
    task = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=3))
    await asyncio.to_thread(steps.wait_until_held)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.release()


@pytest.mark.parametrize("end", [closed, cancelled])
def test_an_answer_that_is_left_is_no_failure(
    engine: Engine, told: Told, steps: Steps, end: Callable[..., Any]
) -> None:
    asyncio.run(end(engine, steps)) if end is cancelled else end(engine)
    (span,) = told.answers
    assert span.status.status_code == StatusCode.UNSET
    assert "error.type" not in attributes(span)
    assert "gen_ai.response.finish_reasons" not in attributes(span)
    if end is not cancelled:  # the task may not have come to read its first token
        assert attributes(span)["gen_ai.usage.input_tokens"] > 0


def failing(engine: Engine, steps: Steps) -> None:
    def fail() -> None:
        raise MemoryError(MARK)

    steps.on_step = fail
    engine.generate(PROMPT, max_new_tokens=3)


def late(engine: Engine, steps: Steps) -> None:
    steps.hold()
    engine.generate(PROMPT, max_new_tokens=3, timeout=0.2)


def crowded(engine: Engine, steps: Steps) -> None:
    limits = Limits(max_batch=1, max_waiting=0)
    full = Engine(engine.model, scheduler=Scheduler(engine.model, limits))
    steps.hold()
    with full.stream(TEXTS[0], max_new_tokens=3):
        full.generate(PROMPT, max_new_tokens=3)


FAILURES = {
    "before it is asked": (
        InvalidOption, lambda engine, _: engine.generate(PROMPT, [MARK * 9]), False
    ),
    "in the first pass": (
        PromptTooLong, lambda engine, _: engine.generate(PROMPT, max_new_tokens=4000), False
    ),
    "in a step": (MemoryError, failing, True),
    "late": (TimedOut, late, True),
    "too many wait": (Overloaded, crowded, False),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_an_error_of_its_kind(
    engine: Engine, told: Told, steps: Steps, case: str
) -> None:
    kind, ask, has_begun = FAILURES[case]
    with pytest.raises(kind):
        ask(engine, steps)
    spans = [span for span in told.answers if "error.type" in attributes(span)]
    (span,) = spans
    assert attributes(span)["error.type"] == kind.__name__
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert ("gen_ai.usage.input_tokens" in attributes(span)) == has_begun
    assert MARK not in span.to_json()
    points = told.metrics()["gen_ai.client.operation.duration"]
    assert points[(kind.__name__,)].count == 1


def test_metrics_add_up_what_the_reports_say(engine: Engine, told: Told) -> None:
    with collect_reports() as reports:
        for n_tokens in (3, 2):  # the second one goes on from the beginning of the first
            engine.generate(f"Read this first.\n\n{PROMPT}", TEXTS, max_new_tokens=n_tokens)
        engine.generate(PROMPT, method="recompute", max_new_tokens=2)
    total, found = reports.total, told.metrics()
    assert found["gen_ai.client.operation.duration"][()].count == 3
    assert found["gen_ai.client.operation.duration"][()].sum > total.ttft_s
    first = found["gen_ai.client.operation.time_to_first_chunk"][()]
    assert (first.count, first.sum) == (3, pytest.approx(total.ttft_s))
    assert 0.01 in first.explicit_bounds and 81.92 in first.explicit_bounds
    assert found["samkv.wait"][()].sum == pytest.approx(total.wait_s)
    tokens = found["gen_ai.client.token.usage"]
    assert tokens[("input",)].sum == total.prompt_tokens
    assert tokens[("output",)].sum == total.completion_tokens
    sources = {name: point.value for (name,), point in found["samkv.prompt.tokens"].items()}
    assert sum(sources.values()) == total.prompt_tokens
    assert sources["chunks"] + sources["prefix"] == total.cached_tokens > sources["prefix"] > 0
    outcomes = {name: point.value for (name,), point in found["samkv.chunks"].items()}
    assert outcomes == {
        "reused": total.reused, "prefix": total.prefix_chunks,
        "computed_now": total.computed_now, "missed": sum(total.chunk_misses.values()),
    } != dict.fromkeys(outcomes, 0)  # fmt: skip
    assert found["samkv.bytes_read"][()].value == total.bytes_read > 0


@pytest.mark.parametrize("names", ["samkv", "redis, samkv"])
def test_it_can_be_switched_off(
    engine: Engine, told: Told, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", names)
    engine.generate(PROMPT, max_new_tokens=1)
    assert told.answers == [] and told.metrics() == {}
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "samkv2")
    engine.generate(PROMPT, max_new_tokens=1)
    assert len(told.answers) == 1


WITHOUT = """
import json, sys
sys.modules["opentelemetry"] = None  # importing it fails, as if it were not installed
from samkv_integrations import Engine
from samkv_integrations.serving.tracing import below_caller
from tests.support.models import tiny_model
engine = Engine(tiny_model("llama"))
with below_caller({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}):
    report = engine.generate("Who?", max_new_tokens=2).report
print(json.dumps(report.to_dict()))
"""


@pytest.mark.slow  # a process of its own, which imports torch: about 4 s
def test_answers_without_opentelemetry() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["completion_tokens"] == 2

"""From a prompt that has been read to an answer that the scheduler can compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from samkv_integrations.engine.answering import Answering, Start
from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Stage
from samkv_integrations.engine.request import Request
from samkv_integrations.engine.text_stream import TextStream
from samkv_integrations.engine.tracing import Trace
from samkv_integrations.model.constraint import JsonConstraint
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampler
from samkv_integrations.prompt.resolve import Resolved


def answering_of(
    model: Model,
    settings: AnswerSettings,
    began: float,
    trace: Trace,
    *,
    resolve: Callable[[], Resolved],
    request: Callable[[Resolved], Request],
    announced_s: Callable[[Resolved], float],
) -> tuple[Answering, Resolved]:
    """The answer to a prompt, nothing computed yet, and the prompt's open caches, which it closes.

    began: when the caller asked, a time of `time.perf_counter`. trace: what to tell of it.
    resolve: reads the prompt, once the settings are known to fit the model.
    request: how to answer it; asked on the model's thread, as is ``announced_s``: the seconds that
        its chunks took in announcements.

    Raises InvalidOption or MissingExtra for what is wrong in the settings, and what ``resolve``
    raises.
    """
    with trace.until_asked():
        end_ids = model.end_ids(settings.stop_ids)
        form = JsonConstraint.of(model, settings.json_schema, end_ids)
        text = TextStream(model, settings.stop)
        resolved, most = resolve(), settings.sampling.max_new_tokens
    n_tokens = len(resolved.token_ids)
    asked = time.perf_counter()

    def begin(check: Callable[[], None]) -> Start:
        wait_s = time.perf_counter() - asked
        with resolved, model.interruptible(check):
            announce_s = announced_s(resolved)
            begun = first_token(request(resolved))
            sampler = Sampler(model, begun.layout.token_ids.tolist(), settings.sampling, form)
            token = sampler.next(begun.logits)
        ttft_s = time.perf_counter() - began
        return Start(
            token=token,
            sampler=sampler,
            decoder=Decoder(model, begun.cache, begun.layout.n_tokens),
            report=replace(begun.report, wait_s=wait_s, announce_s=announce_s, ttft_s=ttft_s),
            stages=(*_before(began, asked, wait_s), *begun.stages),
        )

    kv_bytes = (n_tokens + most) * model.token_kv_bytes
    answering = Answering(
        begin, resolved.close, kv_bytes=kv_bytes, end_ids=end_ids, max_new_tokens=most, text=text,
        trace=trace,
    )  # fmt: skip
    return answering, resolved


def _before(began: float, asked: float, wait_s: float) -> tuple[Stage, Stage]:
    """The stages before the first pass."""
    return (
        Stage(name="read", began=began, ended=asked),
        Stage(name="wait", began=asked, ended=asked + wait_s),
    )

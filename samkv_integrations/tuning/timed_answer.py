"""A greedy answer by a method, and when its first token came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samkv_integrations.engine.decode import Greedy, decode_greedily
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Report
from samkv_integrations.methods import Method
from samkv_integrations.prompt.reader import Prompt

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class TimedAnswer(Greedy):
    """One answer.

    report: its times of decoding and its ``ttft_s`` are not filled in.
    ttft_s: seconds from the prompt to the first token.
    """

    report: Report
    ttft_s: float


def timed_answer(
    engine: Engine,
    prompt: Prompt,
    chunks: Sequence[str],
    method: Method,
    most_tokens: int,
    clock: Clock = time.perf_counter,
) -> TimedAnswer:
    """The likeliest token after another, at most ``most_tokens``, as `Engine.generate` takes them.

    Nothing is stored: a chunk without a cache is text.

    Raises PromptTooLong as `Engine.generate` does.
    """
    began = clock()
    settings = AnswerSettings.of(method=method, on_miss="text")

    def compute() -> TimedAnswer:
        begun = first_token(engine.request(resolved, settings, most_tokens))
        begun.logits.cpu()  # waits for the device
        ttft_s = clock() - began
        answer = decode_greedily(engine.model, begun, most_tokens)
        return TimedAnswer(**vars(answer), report=begun.report, ttft_s=ttft_s)

    with engine.resolve(prompt, chunks) as resolved:
        return engine.scheduler.run(compute)

"""A greedy answer with the logits of its steps, and when its first token came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Report
from samkv_integrations.methods import Method
from samkv_integrations.prompt.reader import Prompt

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class GreedyAnswer:
    """One answer.

    tokens: (n,) ids, the one that ends the answer included if it came. text: without that one.
    logits: (n, vocabulary) float32 on the CPU, before each token.
    report: its times of decoding and its ``ttft_s`` are not filled in.
    ttft_s: seconds from the prompt to the first token.
    """

    tokens: tuple[int, ...]
    text: str
    logits: Tensor
    report: Report
    ttft_s: float


def greedy_answer(
    engine: Engine,
    prompt: Prompt,
    chunks: Sequence[str],
    method: Method,
    most_tokens: int,
    clock: Clock = time.perf_counter,
) -> GreedyAnswer:
    """The likeliest token after another, at most ``most_tokens``, as `Engine.generate` takes them.

    Nothing is stored: a chunk without a cache is text.

    Raises PromptTooLong as `Engine.generate` does.
    """
    began = clock()
    settings = AnswerSettings.of(method=method, on_miss="text")
    end_ids = engine.model.end_ids(())

    def compute() -> GreedyAnswer:
        begun = first_token(engine.request(resolved, settings, most_tokens))
        tokens, logits = [int(begun.logits.argmax())], [begun.logits.float().cpu()]
        ttft_s = clock() - began
        decoder = Decoder(engine.model, begun.cache, begun.layout.n_tokens)
        while len(tokens) < most_tokens and tokens[-1] not in end_ids:
            logits.append(decoder.step(tokens[-1]).float().cpu())
            tokens.append(int(logits[-1].argmax()))
        shown = tokens[:-1] if tokens[-1] in end_ids else tokens
        return GreedyAnswer(
            tokens=tuple(tokens),
            text=engine.model.detokenize(shown).strip(),
            logits=torch.stack(logits),
            report=begun.report,
            ttft_s=ttft_s,
        )

    with engine.resolve(prompt, chunks) as resolved:
        return engine.scheduler.run(compute)

"""Answers that leave the expected one at a near-tie: two tokens that rounding may swap.

A prompt that goes on from kept entries, or that is decoded with others, is computed in other parts
than a prompt alone. Sums are then added in another order, and round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.methods import get_method
from samkv_integrations.options import AnswerSettings
from samkv_integrations.plan.request import Request
from samkv_integrations.runtimes.base import Observer
from samkv_integrations.serving.alone import decode_greedily
from samkv_integrations.serving.first_token import first_token

N_BEST = 20
"""Tokens at each place whose logits are looked at."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The greedy answer to a prompt.

    tokens: with the end token, if the model chose it. best, logits: (n, `N_BEST`) the best tokens
    at the place of each one, and their logits.
    """

    text: str
    tokens: Sequence[int]
    best: Tensor
    logits: Tensor

    def is_near(self, text: str, engine: Engine, noise: float) -> bool:
        """Whether ``text`` leaves this answer at a token that is as good as the expected one.

        noise: by how much rounding moves a logit. Two tokens are as good if their logits differ by
        twice that at most. What follows on such a token is another answer, and is not judged.
        """
        ends, spelled = engine.model.end_ids(()), engine.model.detokenize
        for at in range(len(self.tokens)):
            before = spelled(list(self.tokens[:at]))
            if not text.startswith(before):
                break
            is_close = self.logits[at] >= self.logits[at, 0] - 2 * noise
            for other in self.best[at][is_close].tolist():
                if other in ends:
                    if text == before:
                        return True
                    continue
                made = spelled([*self.tokens[:at], other])
                if text.startswith(made) and not self.text.startswith(made):
                    return True
        return False


def expected(engine: Engine, prompt: str, method: str, most: int) -> Expected:
    """The answer of ``engine``, of at most ``most`` tokens."""
    settings = AnswerSettings.of(method=get_method(method), on_miss="text")

    def greedy(request: Request) -> tuple[list[int], str]:
        first = first_token(request, Observer())
        with closing(first.sequence):
            return decode_greedily(request, first, most)

    with engine.resolve(prompt) as resolved:
        request = engine.request(resolved, settings, capacity=most)
        tokens, _ = engine.scheduler.run(lambda _: greedy(request))
    ends = engine.model.end_ids(())
    text = engine.model.detokenize([each for each in tokens if each not in ends])
    found = torch.as_tensor(engine.logits(prompt, follow=tokens[:-1], method=method))
    best = torch.topk(found, N_BEST)
    return Expected(text=text, tokens=tokens, best=best.indices, logits=best.values)


def noise_of(engine: Engine, prompts: Sequence[str], answers: Sequence[Expected]) -> float:
    """By how much logits of full prefill move if a conversation goes on from kept entries.

    engine: keeps no entries. prompts, answers: of the turns of a conversation. Only the `N_BEST`
    logits of each place count.
    """
    keeping = Engine(engine.model, engine.store, scheduler=engine.scheduler, method="recompute")
    moved = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = torch.as_tensor(keeping.logits(prompt, follow=answer.tokens[:-1]))
        moved = max(moved, float((logits.gather(1, answer.best) - answer.logits).abs().max()))
        keeping.generate(prompt, max_new_tokens=len(answer.tokens))
    return moved

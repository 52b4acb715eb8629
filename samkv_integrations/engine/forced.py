"""Logits along given tokens: what an answer would be drawn from if it were these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings, check_tokens
from samkv_integrations.engine.report import Report

if TYPE_CHECKING:
    from samkv_integrations.engine.engine import Engine
    from samkv_integrations.eviction import Eviction
    from samkv_integrations.methods import Method
    from samkv_integrations.prompt.reader import Prompt


@dataclass(frozen=True, kw_only=True)
class ForcedTokens:
    """What a prompt and given tokens after it come to.

    logits: (1 + n, vocabulary) float32 on the CPU, of the first token and after each of the n
    given ones. report: of the first token.
    """

    logits: torch.Tensor
    report: Report


def forced(
    engine: Engine,
    prompt: Prompt,
    chunks: Sequence[str] | None = None,
    *,
    follow: Sequence[int] = (),
    method: str | Method | None = None,
    eviction: str | Eviction | None = None,
) -> ForcedTokens:
    """`Engine.logits` with a report. Arguments and errors are those of it."""
    check_tokens("follow", follow, engine.model)
    settings = AnswerSettings.of(method=method, eviction=eviction, on_miss="text")

    def compute() -> ForcedTokens:
        begun = first_token(engine.request(resolved, settings, max(1, len(follow))))
        decoder = Decoder(engine.model, begun.cache, begun.layout.n_tokens)
        logits = torch.stack([begun.logits, *map(decoder.step, follow)]).float().cpu()
        return ForcedTokens(logits=logits, report=begun.report)

    with engine.resolve(prompt, chunks) as resolved:
        return engine.scheduler.run(compute)

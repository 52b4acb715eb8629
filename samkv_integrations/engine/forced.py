"""Logits along given tokens: what an answer would be drawn from if it were these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class ForcedTokens:
    """What a prompt and given tokens after it come to.

    logits: (1 + n, vocabulary) float32 on the CPU, of the first token and after each of the n
    given ones. report: of the first token.
    """

    logits: torch.Tensor
    report: Report


def force(request: Request, follow: Sequence[int]) -> ForcedTokens:
    """The answer to a request forced along the tokens ``follow``, on the model's thread.

    The request needs room for them. Errors are those of `first_token`.
    """
    begun = first_token(request)
    decoder = Decoder(request.model, begun.cache, begun.layout.n_tokens)
    logits = torch.stack([begun.logits, *map(decoder.step, follow)]).float().cpu()
    return ForcedTokens(logits=logits, report=begun.report)

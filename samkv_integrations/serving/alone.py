"""Answers one request alone, in the model's thread: for inspection, not for serving."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from samkv_integrations.options import Sampling
from samkv_integrations.plan.request import Request
from samkv_integrations.report import Report
from samkv_integrations.runtimes.base import Observer
from samkv_integrations.serving.first_token import FirstToken, first_token


def decode_greedily(request: Request, first: FirstToken, most_tokens: int) -> tuple[list[int], str]:
    """The answer of `Engine.generate` with its default options, of at most ``most_tokens``.

    Returns its tokens, with the end token if the model chose it, and its text. The default options
    include the repetition penalty of the model's generation config, if it has one. The request
    needs room for the tokens.
    """
    model, end_ids = request.model, request.model.end_ids(())
    sampler = model.sampler(request.resolved.token_ids, Sampling.of(), None)
    tokens = [sampler.next(first.logits)]
    while len(tokens) < most_tokens and tokens[-1] not in end_ids:
        ((logits,),) = model.decode([first.sequence], [tokens[-1:]])
        tokens.append(sampler.next(logits))
    shown = tokens[:-1] if tokens[-1] in end_ids else tokens
    return tokens, model.detokenize(shown).strip()


def force(request: Request, follow: Sequence[int]) -> tuple[Any, Report]:
    """Answer a request with the tokens ``follow``, whatever the model would choose.

    Returns logits (1 + n, vocabulary) float32 on the CPU, of the first token and after each of the
    n given ones, and the first token's report. The request needs room for the tokens. Raises as
    `first_token` does.
    """
    first = first_token(request, Observer())
    if first.kept is not None and follow:
        request.drop(first.kept)  # its entries grow with the answer
    found = [first.logits]
    with closing(first.sequence):
        for token in follow:
            found.extend(request.model.decode([first.sequence], [[token]])[0])
    return request.model.stacked(found), first.report

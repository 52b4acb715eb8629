"""A greedy answer with the logits of its steps, for who compares answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.request import FirstToken
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampler, Sampling


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """One answer.

    tokens: (n,) ids, the one that ends the answer included if it came. shown: without that one;
    text: of these. logits: (n, vocabulary) float32 on the CPU, the model's own before each token.
    """

    tokens: tuple[int, ...]
    shown: tuple[int, ...]
    text: str
    logits: Tensor


def decode_greedily(model: Model, begun: FirstToken, most_tokens: int) -> Greedy:
    """The tokens that `Engine.generate` takes by default, at most ``most_tokens``.

    So with the repetition penalty of the model's own configuration, if it has one. On the model's
    thread; the request needs room for the tokens.
    """
    sampler = Sampler(model, begun.layout.token_ids.tolist(), Sampling())
    decoder = Decoder(model, begun.cache, begun.layout.n_tokens)
    end_ids = model.end_ids(())
    logits = [begun.logits.float().cpu()]
    tokens = [sampler.next(begun.logits)]
    while len(tokens) < most_tokens and tokens[-1] not in end_ids:
        found = decoder.step(tokens[-1])
        logits.append(found.float().cpu())
        tokens.append(sampler.next(found))
    shown = tokens[:-1] if tokens[-1] in end_ids else tokens
    return Greedy(
        tokens=tuple(tokens),
        shown=tuple(shown),
        text=model.detokenize(shown).strip(),
        logits=torch.stack(logits),
    )

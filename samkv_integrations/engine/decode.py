"""The tokens of answers after their first ones, those of several answers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.model.model import Model
from samkv_integrations.model.single_token import for_single_token


class Decoder:
    """Computes one answer token after another over a working cache.

    ``position`` is the next token's place in the logical prompt, which counts all tokens of all
    chunks although entries are missing from the cache.
    """

    def __init__(self, model: Model, cache: WorkingCache, position: int) -> None:
        self.model = model
        self.cache = cache
        self.position = position

    def step(self, token: int) -> Tensor:
        """Logits (vocabulary,) after ``token``."""
        return decode([self], [token])[0]


def decode(decoders: Sequence[Decoder], tokens: Sequence[int]) -> Tensor:
    """Logits (answers, vocabulary) after the next token of each answer, from one step of the model.

    The weights are read once for all answers, each of which attends to its own working cache. The
    decoders are of one model.
    """
    model = decoders[0].model
    cos, sin = model.cos_sin(torch.tensor([decoder.position for decoder in decoders]))
    caches = [decoder.cache for decoder in decoders]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        sides = (torch.split(side, 1, 2) for side in (query, key, value))
        own = zip(caches, *sides, strict=True)
        return torch.cat([cache.attend(layer, q, k, v, scaling) for cache, q, k, v in own], 2)

    # The layers see answers as tokens of one sequence: they meet nowhere but in attention.
    with for_single_token(model.device, model.dtype) if len(tokens) == 1 else nullcontext():
        hidden = model.embed(torch.tensor([list(tokens)]))
        for layer in range(model.n_layers):
            hidden = model.layer(layer, hidden, cos, sin, attend)
        logits = model.logits(hidden[0])
    for decoder in decoders:
        decoder.position += 1
    return logits

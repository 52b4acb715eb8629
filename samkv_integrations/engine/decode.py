"""The tokens of an answer after the first."""

from __future__ import annotations

import torch
from torch import Tensor

from samkv_integrations.engine.working_cache import WorkingCache
from samkv_integrations.model.model import Model


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
        cos, sin = self.model.cos_sin(torch.tensor([self.position]))
        hidden = self.model.embed(torch.tensor([[token]]))
        for layer in range(self.model.n_layers):
            hidden = self.model.layer(layer, hidden, cos, sin, self.cache.attend)
        self.position += 1
        return self.model.logits(hidden[0])[0]

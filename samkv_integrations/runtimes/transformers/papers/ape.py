"""APE (arXiv 2502.05431): parallel chunks; attention to them is sharpened and scaled down.

Yang, Chen, Chen: APE, Faster and Longer Context-Augmented Generation via Adaptive Parallel
Encoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class ApeAttention:
    """Softmax in two parts, over the context and over the rest (section 4).

    Logits of the context are divided by ``temperature``; their log-sum-exp is multiplied by
    ``scale`` before the two parts are merged. With 1 and 1 this is ordinary attention.

    temperature: 0.9 in the authors' code; it must be above 0. scale: 0.9 in that code.

    Deviations: every token without a cache attends this way, also between chunks.
    """

    temperature: float = 0.9
    scale: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidOption(f"temperature={self.temperature}; it must be finite and above 0")
        if not 0 <= self.scale < math.inf:
            raise InvalidOption(f"scale={self.scale}; it must be finite, and 0 or more")

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        mask: Tensor | None,
        is_context: Tensor,
    ) -> Tensor:
        n_groups, dim = keys.shape[1], keys.shape[3]
        grouped = query[0].float().reshape(n_groups, -1, query.shape[2], dim)  # (G, H/G, R, D)
        logits = torch.einsum("ghrd,gsd->ghrs", grouped, keys[0].float()) * scaling
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf)
        context = is_context.expand(n_groups, -1)[:, None, None]
        of_context = (logits / self.temperature).masked_fill(~context, -math.inf)
        together = of_context.logsumexp(-1, keepdim=True)
        shift = ((self.scale - 1) * together).where(together.isfinite(), 0.0)
        weights = logits.where(~context, of_context + shift).softmax(-1)
        output = torch.einsum("ghrs,gsd->ghrd", weights, values[0].float())
        return output.flatten(0, 1)[None].to(query.dtype)


APE = Method(
    name="ape",
    paper="arXiv 2502.05431",
    summary="chunks side by side, attention to them with temperature and scale",
    positions="local",
    attend=ApeAttention(),
)
"""APE with the defaults of its code.

Its shared prefix is the engine's ``prefix_text``: chunks are computed behind it, and a prompt
that begins with it attends to it once. Keys keep the positions at which they were computed, so all
chunks share positions. Deviation: the question keeps its position behind all chunks.
"""

"""PyramidKV (arXiv 2406.02069): SnapKV with larger budgets in lower layers.

Cai et al.: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from samkv_integrations.eviction.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """`SnapKV` whose budgets fall in equal steps from the lowest layer to the highest one.

    arXiv 2406.02069, section 4.2. With b entries a layer besides the window, the highest layer
    keeps b / beta of them and the lowest 2 b - b / beta, so that the mean is b; where the lowest
    one would get more entries than there are, it keeps all, and the highest one gets what that
    leaves.

    beta: how steep (the paper's 20). window, kernel, pooling: see `SnapKV`.

    Deviations: those of `SnapKV`. The authors' code rounds the step, here each layer's budget is
    rounded down, so that their mean is never above the budget. As there, a prompt shorter than
    2 b gets the same budget in every layer. "As many as there are" counts the logical prompt,
    although a method may have kept less of it at a layer.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "arXiv 2406.02069"
    summary: ClassVar[str] = "snapkv with more entries in lower layers, fewer in higher ones"

    def __post_init__(self) -> None:
        self._at_least("beta", 1)
        super().__post_init__()

    def layer_budget(self, n_tokens: int, layer: int, n_layers: int) -> int:
        budget = self.budget(n_tokens)
        mean = budget - self.window
        if n_layers == 1 or n_tokens <= budget or n_tokens < 2 * mean:
            return budget
        low = mean // self.beta
        high = min(2 * mean - low, n_tokens - self.window)
        low = 2 * mean - high
        return self.window + (high * (n_layers - 1) - (high - low) * layer) // (n_layers - 1)

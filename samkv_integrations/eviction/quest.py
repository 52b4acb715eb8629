"""Quest (arXiv 2406.10774): each step attends to the tokens that its query scores highest.

Tang et al.: Query-Aware Sparsity for Efficient Long-Context LLM Inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.eviction.base import Chooser, Logits, Seen, SparseEviction

_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Quest(SparseEviction):
    """The context tokens with the largest softmax, summed over heads; the rest as one token.

    That token has the sum of their weights, and the mean value of the context.

    Deviations: the paper ranks pages of 16 tokens by an upper bound, from the smallest and the
        largest key of each channel (section 3.3). Here a page is one token, and its quantised key
        takes the place of the bound: on real text pages of 16 and of 8 were far worse at the same
        share (docs/decisions.md). All heads of a layer share one choice. The paper leaves the
        first two layers dense. The one token for the rest is from SparQ Attention (arXiv
        2312.04985, section 3), whose mean is over all values so far.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "arXiv 2406.10774"
    summary: ClassVar[str] = "nothing dropped; each step attends to its own best tokens"

    @property
    def min_tokens(self) -> int:
        return 64

    def chooser(self, budget: int, seen: Seen, context: Tensor) -> Chooser:
        def choose(query: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
            weights = logits()
            top = weights.amax(-1, keepdim=True)
            weights.sub_(top).exp_()  # of each head (H, n), over that of its largest
            scores = weights.sum(-1).reciprocal() @ weights  # the softmax, summed over heads
            best = scores.topk(budget, sorted=False).indices.sort().values
            rest = weights.index_fill_(-1, best, 0).sum(-1)
            return best, top[:, 0] + rest.clamp_min(_LEAST).log()

        return Chooser(count=budget, choose=choose)

"""A3: recomputes the tokens that the question attends to at layer 1.

Attention-Aware Accurate KV Cache Fusion for Fast Large Language Model Serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.methods.base import Method
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.base import Checked, RecomputeFrom, top_tokens


@dataclass(frozen=True, kw_only=True)
class A3Recompute(RecomputeFrom):
    """The ``ratio`` of tokens with the highest attention of the question (section 3.2, eq. 3).

    All tokens are computed up to the check layer. There a token's score is the attention of all
    question tokens and heads to it, with a softmax over the computed context tokens only.

    ratio: 0.15 by default; the paper gives no value.

    Deviations: tokens of chunks with an exact cache are not candidates. The decode-time extension
    is ``eviction="snapkv"``.
    """

    def choose_after(self, checked: Checked, layout: TensorLayout) -> Tensor:
        _, n_rows, dim = checked.queries.shape
        queries = checked.queries.float().reshape(checked.keys.shape[1], -1, n_rows, dim)
        logits = torch.einsum("grwd,ngd->grwn", queries, checked.keys.float()) * checked.scaling
        attention = logits.softmax(-1).sum((0, 1, 2))
        return top_tokens(attention, checked.tokens, self.ratio, layout)


A3 = Method(
    name="a3",
    paper="A3 (Attention-Aware Accurate KV Cache Fusion)",
    summary="everything kept; the 15 % that the question attends to at layer 1 recomputed",
    recompute=A3Recompute(),
)

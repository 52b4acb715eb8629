"""CacheBlend (arXiv 2405.16444): recomputes the tokens whose cached values deviate most.

Yao et al.: CacheBlend, Fast Large Language Model Serving for RAG with Cached Knowledge Fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samkv_integrations.methods.base import Method
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.base import Checked, RecomputeFrom, top_tokens


@dataclass(frozen=True, kw_only=True)
class CacheblendRecompute(RecomputeFrom):
    """The ``ratio`` of tokens with the highest KV deviation at the check layer (section 4.3).

    All tokens are computed up to that layer. The deviation of a token is the squared distance
    between its computed and its cached value, over all heads.

    ratio: 0.15, which the paper finds sufficient; its code has 0.16.

    Deviations: the paper narrows the set layer by layer; its code keeps one set, and so does this.
    Question tokens are always computed and are not candidates; in the code's examples they are. At
    the check layer the code computes queries of the chosen tokens only; here of all tokens.
    """

    def choose_after(self, checked: Checked, layout: TensorLayout) -> Tensor:
        _, cached = checked.cached()
        deviation = (checked.values.float() - cached.float()).square().sum((1, 2))
        return top_tokens(deviation, checked.tokens, self.ratio, layout)


CACHEBLEND = Method(
    name="cacheblend",
    paper="arXiv 2405.16444",
    summary="everything kept; the 15 % whose values deviate most at layer 1 recomputed",
    recompute=CacheblendRecompute(),
)

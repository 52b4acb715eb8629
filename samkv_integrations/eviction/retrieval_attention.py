"""RetrievalAttention (arXiv 2409.10516): each step attends to the keys nearest to its query.

Liu et al.: Accelerating Long-Context LLM Inference via Vector Retrieval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from samkv_integrations.eviction.base import Chooser, Logits, Seen, SparseEviction, best_of_heads


@dataclass(frozen=True, kw_only=True)
class RetrievalAttention(SparseEviction):
    """The first and last context tokens, and of those between the keys nearest to the query.

    The nearest keys have the largest inner product with the query of a head (sections 3.1 and 3.3).
    All other tokens are left out of the step's softmax (equation 2).

    first, last: context tokens at both ends that each step attends to, the static pattern.

    Deviations: exact search over all keys stands in for the paper's index, a graph built from the
        prompt's queries (section 3.2), so a step takes the time of an exact search. In the paper
        each head attends to its own 100 nearest keys. Here all heads of a layer share the union of
        their nearest k, for the largest k that fits into the budget (`best_of_heads`). The paper
        has 128 first and 512 last tokens, of the whole prompt, for longer prompts; here they count
        context tokens, and tokens outside the context come on top.
    """

    first: int = 16
    last: int = 64

    name: ClassVar[str] = "retrieval-attention"
    paper: ClassVar[str] = "arXiv 2409.10516"
    summary: ClassVar[str] = "nothing dropped; each step attends to both ends and its nearest keys"
    at_least: ClassVar[Mapping[str, int]] = {"first": 0, "last": 0}

    @property
    def min_tokens(self) -> int:
        return self.first + self.last + 1

    def chooser(self, budget: int, seen: Seen, context: Tensor) -> Chooser:
        def choose(query: Tensor, logits: Logits) -> tuple[Tensor, None]:
            scores = logits()
            scores[:, : self.first] = math.inf
            scores[:, len(context) - self.last :] = math.inf
            return best_of_heads(scores[None], budget)[0], None

        return Chooser(count=budget, choose=choose)

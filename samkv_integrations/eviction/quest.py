"""Quest (arXiv 2406.10774): every step attends to what its own query asks for.

Tang et al.: Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from samkv_integrations.eviction.parts import Eviction


@dataclass(frozen=True, kw_only=True)
class Quest(Eviction):
    """Nothing is dropped; a step attends, per layer, to the context's best tokens for its query.

    All text that is not context is attended to as well: the question, the conversation, the answer
    so far. Because nothing is dropped, the context may stay in memory in few bits.

    budget_tokens, budget_ratio: of the context, attended to by a step.

    Deviations from arXiv 2406.10774: the paper ranks pages of 16 tokens by a bound, the products of
    the query with the smallest and the largest key of each channel (section 3.3). Here a page is
    one token, whose bound is its key, in few bits: on real text pages of 16 and of 8 were far worse
    at the same share (docs/decisions.md). One choice a layer serves all heads, by the sum of their
    softmax. The paper leaves the first two layers dense.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "arXiv 2406.10774"
    summary: ClassVar[str] = "nothing dropped; each step attends to its own best tokens"

    @property
    def min_tokens(self) -> int:
        return 64

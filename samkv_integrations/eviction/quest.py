"""Quest (arXiv 2406.10774): every step attends to what its own query asks for.

Tang et al.: Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from samkv_integrations.eviction.base import Eviction


@dataclass(frozen=True, kw_only=True)
class Quest(Eviction):
    """Nothing is dropped; a step attends, per layer, to the context's best tokens for its query.

    All text that is not context is attended to as well: the question, the conversation, the answer
    so far. The rest of the context counts as one token, of the weight that its tokens have together
    and of the context's mean value. Because nothing is dropped, it stays in memory in few bits.

    budget_tokens, budget_ratio: of the context, attended to by a step.

    Deviations from arXiv 2406.10774: the paper ranks pages of 16 tokens by a bound, the products of
    the query with the smallest and the largest key of each channel (section 3.3). Here a page is
    one token, whose bound is its key, in few bits: on real text pages of 16 and of 8 were far worse
    at the same share (docs/decisions.md). One choice a layer serves all heads, by the sum of their
    softmax. The paper leaves the first two layers dense. One token for all the rest is of SparQ
    Attention (arXiv 2312.04985, section 3), whose mean is of all values so far.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "arXiv 2406.10774"
    summary: ClassVar[str] = "nothing dropped; each step attends to its own best tokens"

    @property
    def min_tokens(self) -> int:
        return 64

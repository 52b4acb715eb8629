"""Rules that drop nothing: each step attends to a few context tokens only.

Tang et al.: Query-Aware Sparsity for Efficient Long-Context LLM Inference. Xiao et al.: InfLLM,
Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory. Liu et al.:
RetrievalAttention, Accelerating Long-Context LLM Inference via Vector Retrieval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.eviction.base import (
    Chooser,
    Logits,
    Seen,
    SparseEviction,
    best_of_heads,
)

_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Quest(SparseEviction):
    """The tokens with the largest softmax, summed over heads; the rest as one (arXiv 2406.10774).

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


@dataclass(frozen=True, kw_only=True)
class InfLLM(SparseEviction):
    """The first and last context tokens, and the best blocks of those between (arXiv 2402.04617).

    A block is represented by its tokens with most attention from later tokens, for each head
    (section 3.2). Its score is the inner product of the step's query with the mean of their keys,
    summed over heads. The method `multi-infllm`, SamKV's baseline of that name, chooses once,
    before the first token.

    first, last: context tokens at both ends that each step attends to. It also attends to tokens
    that fill no block. block: tokens of a block. representatives: tokens that represent a block
    (4 in the paper), or all of its tokens if it has fewer.

    Deviations: the paper has 128 first and 4,096 last tokens, of the whole prompt, and blocks of
        128, for longer prompts; here first and last count context tokens, and tokens outside the
        context come on top. Keys keep their true positions; the paper gives all blocks the same
        distance, to exceed the length that a model was trained for, which this engine never does.
        Only tokens computed for this question count as attending, at any distance: with the method
        ``recompute`` all tokens do. The prompt itself is computed without blocks.
    """

    first: int = 16
    last: int = 64
    block: int = 32
    representatives: int = 4

    name: ClassVar[str] = "infllm"
    paper: ClassVar[str] = "arXiv 2402.04617"
    summary: ClassVar[str] = "nothing dropped; each step attends to both ends and its best blocks"
    at_least: ClassVar[Mapping[str, int]] = {
        "first": 0, "last": 0, "block": 1, "representatives": 1,
    }  # fmt: skip

    @property
    def min_tokens(self) -> int:
        return self.first + self.last + 2 * self.block - 1

    def chooser(self, budget: int, seen: Seen, context: Tensor) -> Chooser:
        n_tokens, (_, n_kv_heads, dim) = len(context), seen.keys.shape
        n_blocks = (n_tokens - self.first - self.last) // self.block
        stop = self.first + n_blocks * self.block
        n_best = (budget - self.first - n_tokens + stop) // self.block
        tokens = torch.arange(n_tokens, device=context.device)
        blocks, slots = tokens[self.first : stop].view(n_blocks, -1), context[self.first : stop]
        given = torch.stack([w.sum(2).index_select(2, slots) for w in seen.weights()]).sum(0)
        of_blocks = given.view(*given.shape[:2], *blocks.shape)
        places = of_blocks.topk(min(self.representatives, self.block)).indices
        keys = seen.keys.index_select(0, slots).view(*blocks.shape, n_kv_heads, dim)
        keys = keys.permute(2, 0, 1, 3)[:, None].expand(-1, given.shape[1], -1, -1, -1)
        means = keys.gather(3, places[..., None].expand(-1, -1, -1, -1, dim)).float().mean(3)

        def choose(query: Tensor, logits: Logits) -> tuple[Tensor, None]:
            of_heads = query.float().view(n_kv_heads, -1, dim)
            scores = torch.einsum("grd,grbd->b", of_heads, means)
            best = blocks.index_select(0, scores.topk(n_best).indices.sort().values)
            return torch.cat((tokens[: self.first], best.flatten(), tokens[stop:])), None

        return Chooser(count=self.first + n_best * self.block + n_tokens - stop, choose=choose)


@dataclass(frozen=True, kw_only=True)
class RetrievalAttention(SparseEviction):
    """The first and last context tokens, and the keys nearest to the query (arXiv 2409.10516).

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


QUEST = Quest(budget_ratio=0.1)
INFLLM = InfLLM(budget_ratio=0.2)
RETRIEVAL_ATTENTION = RetrievalAttention(budget_ratio=0.1)

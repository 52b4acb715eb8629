"""InfLLM (arXiv 2402.04617): each step looks up blocks of the context by representative tokens.

Xiao et al.: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory. The
method `multi-infllm` is SamKV's baseline of that name: it chooses once, before the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from samkv_integrations.eviction.base import Chooser, Logits, Seen, SparseEviction


@dataclass(frozen=True, kw_only=True)
class InfLLM(SparseEviction):
    """The first and last context tokens, and the best blocks of those between (section 3.2).

    A block is represented by its tokens with most attention from later tokens, for each head. Its
    score is the inner product of the step's query with the mean of their keys, summed over heads.

    first, last: context tokens at both ends that each step attends to; so are those that fill no
    block. block: tokens of a block. representatives: of a block (4 in the paper), or all of its
    tokens if it has fewer.

    Deviations: the paper has 128 first and 4,096 last tokens, of the whole prompt, and blocks of
        128, for longer prompts; here first and last count context tokens, and tokens outside the
        context come on top. Keys keep their true positions; the paper gives all blocks the same
        distance, to exceed the length that a model was trained for, which this engine never does.
        Only tokens computed for this question attend, at any distance: with the method
        ``recompute`` all do. The prompt itself is computed without blocks.
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

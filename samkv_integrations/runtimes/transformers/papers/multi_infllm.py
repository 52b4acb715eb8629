"""InfLLM (arXiv 2402.04617) for many contexts: the best blocks of each chunk, chunk by chunk.

Xiao et al.: InfLLM, Training-Free Long-Context Extrapolation for LLMs with an Efficient Context
Memory. As a baseline for many contexts: Multi-InfLLM in SamKV (arXiv 2508.11661). The eviction
`infllm` looks blocks up at each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samkv_integrations.methods.base import Method, check_ratio
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.base import (
    AnchorProbe,
    SelectionInputs,
    fill_budget,
    group_heads,
)


@dataclass(frozen=True, kw_only=True)
class MultiInfllmSelect(AnchorProbe):
    """Initial and local blocks of each chunk, and its best middle blocks for the question.

    Queries come from a pass of the question over the anchor tokens. A block's score is the inner
    product of its representative with the mean query of the question's tokens, summed over heads,
    both un-rotated, so that all blocks are equally far away (section 3.2).

    max_kept_ratio: kept tokens as a share of each chunk, anchors included; anchors are always kept.
        1 keeps all tokens.

    Deviations: the representative is the mean key of the block, where the paper takes the mean of
    its four tokens with the highest local attention; blocks have the engine's size (128 there);
    the choice is made once for each request, not again while decoding.
    """

    max_kept_ratio: float = 0.2

    def __post_init__(self) -> None:
        check_ratio("max_kept_ratio", self.max_kept_ratio)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(("block_means",))

    def choose(
        self, scores: Tensor | None, inputs: SelectionInputs, layout: TensorLayout
    ) -> Tensor:
        assert scores is not None and inputs.block_means is not None
        query = group_heads(scores, inputs.block_means.shape[2])  # (L, G, D)
        of_blocks = torch.einsum("lgd,lbgd->lb", query, inputs.block_means)
        middle = layout.middle_of_chunk.to(of_blocks.device)
        order = of_blocks[:, None].masked_fill(~middle, -math.inf)  # (L, C, Nb)
        of_chunk, of_anchor = (
            torch.bincount(chunk, minlength=layout.n_chunks).double()
            for chunk in (
                layout.chunk_of_token,
                layout.chunk_of_token[layout.is_anchor[layout.block_of_token]],
            )
        )
        budget = (self.max_kept_ratio * of_chunk - of_anchor).repeat(inputs.n_layers)[:, None]
        chosen = fill_budget(order.flatten(0, 1), layout, budget).view_as(order).any(1)
        return chosen.cpu() | layout.is_anchor


MULTI_INFLLM = Method(
    name="multi-infllm",
    paper="arXiv 2402.04617",
    summary="anchors and each chunk's best blocks by mean keys; nothing recomputed",
    select=MultiInfllmSelect(),
)

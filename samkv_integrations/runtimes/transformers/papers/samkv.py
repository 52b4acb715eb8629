"""SamKV (arXiv 2508.11661): sparse selection across chunks, then partial recomputation.

Cao, Si, Zhang, Liu: Sparse Attention across Multiple-context KV Cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.methods.base import Method, check_ratio
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.base import (
    AnchorProbe,
    LayerRecompute,
    SelectionInputs,
    Update,
    fill_budget,
    group_heads,
)


@dataclass(frozen=True, kw_only=True)
class SamkvSelect(AnchorProbe):
    """Blocks by personalised query, dynamic share and ranking across chunks (sections 3.1, 3.2).

    max_kept_ratio: limit of kept tokens as a share of the context; the anchors are always kept,
        even beyond it. None for no limit.
    bias: whether to add the personalised bias (equation 1). middle: whether to select middle
        blocks at all. Both are columns of the paper's Table 4.

    Deviations: the limit is ours; the paper's share P is unbounded. docs/methods.md lists details
    that the paper leaves open.
    """

    max_kept_ratio: float | None = 0.15
    bias: bool = True
    middle: bool = True

    def __post_init__(self) -> None:
        if self.max_kept_ratio is not None:
            check_ratio("max_kept_ratio", self.max_kept_ratio)

    @property
    def needs(self) -> frozenset[str]:
        if not self.middle:
            return frozenset()
        bias = ("local_query",) if self.bias else ()
        return frozenset(("block_means", "anchor_mean", "statistics", *bias))

    def probe_blocks(self, layout: TensorLayout) -> Tensor | None:
        return super().probe_blocks(layout) if self.middle else None

    def choose(
        self, scores: Tensor | None, inputs: SelectionInputs, layout: TensorLayout
    ) -> Tensor:
        anchors = layout.is_anchor.expand(inputs.n_layers, -1)
        if not self.middle:
            return anchors
        assert scores is not None and inputs.block_means is not None  # scores (L, H, D) are Q_que
        n_kv_heads = inputs.block_means.shape[2]
        if self.bias:
            assert inputs.local_query is not None
            personal = personalise(scores, inputs.local_query)
        else:
            personal = scores[:, None].expand(-1, layout.n_chunks, -1, -1)
        personal = group_heads(personal, n_kv_heads)  # (L, C, G, D)
        of_blocks = block_scores(personal, inputs.block_means, layout)  # (L, Nb)
        share = selected_share(personal, of_blocks, inputs)  # (C,)
        candidates = top_share(of_blocks, share, layout)
        ranked = rank_across(of_blocks, candidates, layout)
        n_anchor = int(layout.block_lengths[layout.is_anchor].sum())
        cap = 1.0 if self.max_kept_ratio is None else self.max_kept_ratio
        chosen = fill_budget(ranked, layout, cap * layout.n_context - n_anchor)
        return chosen.cpu() | anchors


def personalise(query: Tensor, local_query: Tensor) -> Tensor:
    """A personalised query for each chunk (SamKV equation 1).

    query (L, H, D), local_query (L, C, H, D) -> (L, C, H, D): the query plus, for each chunk, the
    mean of the other chunks' local queries, each weighted with its absolute cosine to the query
    over the whole (H, D) vector. With one chunk there is no bias.
    """
    n_chunks = local_query.shape[1]
    spread = query[:, None].expand_as(local_query)
    if n_chunks == 1:
        return spread
    cosine = F.cosine_similarity(spread.flatten(2), local_query.flatten(2), dim=-1)
    weighted = cosine.abs()[..., None, None] * local_query
    return spread + (weighted.sum(1, keepdim=True) - weighted) / (n_chunks - 1)


def block_scores(personal: Tensor, block_means: Tensor, layout: TensorLayout) -> Tensor:
    """(L, Nb): inner product of each block's mean key with its chunk's query, mean over groups.

    personal (L, C, G, D), block_means (L, Nb, G, D).
    """
    own = personal[:, layout.block_chunk.to(personal.device)]
    return (own * block_means).sum(-1).mean(-1)


def selected_share(personal: Tensor, scores: Tensor, inputs: SelectionInputs) -> Tensor:
    """(C,) share P of each chunk's middle blocks to select: equation 2 averaged as equation 3.

    0 where the prompt lacks one of the two blocks that the equation compares.
    """
    assert inputs.anchor_mean is not None
    assert inputs.block_max is not None and inputs.block_min is not None
    anchor = (personal * inputs.anchor_mean).sum(-1).mean(-1)  # (L, C)
    top = scores.gather(1, inputs.block_max.clamp(min=0))
    low = scores.gather(1, inputs.block_min.clamp(min=0))
    is_held = (inputs.block_max >= 0) & (inputs.block_min >= 0)
    inside = (low < anchor) & (anchor <= top) & is_held
    share = torch.where(inside, (top - anchor) / (top - low), 0.0).clamp(0, 1)
    return share[list(inputs.stable_layers)].mean(0)


def top_share(scores: Tensor, share: Tensor, layout: TensorLayout) -> Tensor:
    """(L, Nb) bool: the best ``share`` (C,) of a chunk's middle blocks, rounded up, per layer."""
    middle = layout.middle_of_chunk.to(scores.device)  # (C, Nb)
    per_chunk = scores[:, None].masked_fill(~middle, -math.inf)  # (L, C, Nb)
    rank = per_chunk.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    count = (share * middle.sum(-1)).ceil()  # (C,)
    return ((rank < count[:, None]) & middle).any(1)


def rank_across(scores: Tensor, candidates: Tensor, layout: TensorLayout) -> Tensor:
    """(L, Nb) order of the blocks that are kept across chunks; -inf for all other blocks.

    Scores become comparable by a softmax over each chunk's middle blocks; of all candidates of a
    layer the best ceil(candidates / C) stay (section 3.2, last paragraph). The logarithm of the
    softmax gives the same order, and does not vanish if scores are far apart.
    """
    middle = layout.middle_of_chunk.to(scores.device)
    per_chunk = scores[:, None].masked_fill(~middle, -math.inf).log_softmax(-1)
    normalised = per_chunk.nan_to_num(nan=-math.inf).amax(1)  # each block belongs to one chunk
    order = normalised.masked_fill(~candidates, -math.inf)
    rank = order.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    count = (candidates.sum(-1, keepdim=True) / max(1, layout.n_chunks)).ceil()
    return order.masked_fill(rank >= count, -math.inf)


@dataclass(frozen=True, kw_only=True)
class SamkvRecompute(LayerRecompute):
    """Anchor tokens and outliers of every chunk that is not exact (section 3.3, Appendix A.1).

    Outliers are tokens with outlying attention inside selected middle blocks.

    Deviations: exact chunks are not recomputed. A token that is computed at a layer where its block
    is not kept attends there with its computed keys and values, not with stored ones, which would
    have to be read for it.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(("statistics",))

    def choose_layers(self, kept: Tensor, inputs: SelectionInputs, layout: TensorLayout) -> Tensor:
        assert inputs.outliers is not None
        wanted = layout.is_anchor[layout.block_of_token] | inputs.outliers.cpu()
        return kept & wanted & ~layout.exact[layout.chunk_of_token]


def fuse(cached: Tensor, computed: Tensor) -> Tensor:
    """The updated entry (SamKV equation 4): theta * computed + (1 - theta) * cached.

    theta is the cosine of computed and cached for each token, over all heads. Both (R, G, D), keys
    at the same position. Returns the dtype of ``computed``.
    """
    old, new = cached.float(), computed.float()
    theta = F.cosine_similarity(new.flatten(1), old.flatten(1), dim=1)[:, None, None]
    return (theta * new + (1 - theta) * old).to(computed.dtype)


def _samkv(name: str, update: Update | None, how: str) -> Method:
    return Method(
        name=name,
        paper="arXiv 2508.11661",
        summary=f"anchors and blocks chosen across chunks; anchors and outliers recomputed; {how}",
        select=SamkvSelect(),
        recompute=SamkvRecompute(),
        update=update,
    )


SAMKV_OVERWRITE = _samkv("samkv-overwrite", None, "recomputed entries replace cached ones")
SAMKV_FUSION = _samkv("samkv-fusion", fuse, "recomputed entries mixed with cached ones by cosine")

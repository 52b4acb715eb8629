"""SamKV's frame with the last token's question and real keys: the engine's default.

Ours. From SamKV (arXiv 2508.11661): per-layer choice of blocks across chunks, personalised bias,
partial recomputation, fusion. From SAGE-KV (arXiv 2503.08879): the last prompt token knows what it
is looking for. From A3 and EPIC (arXiv 2410.15332): recompute what the question attends to, and the
first tokens of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.layout import Layout, Selection
from samkv_integrations.methods.parts import (
    Evidence,
    Method,
    Probe,
    check_ratio,
    fill_budget,
    overwrite,
    personalise,
)
from samkv_integrations.rope import rotate

Blocks = Literal["none", "initial", "anchors"]


def _blocks(name: Blocks, layout: Layout) -> Tensor:
    if name == "anchors":
        return layout.is_anchor
    if name == "initial":
        return layout.is_initial
    return torch.zeros_like(layout.is_anchor)


@dataclass(frozen=True, kw_only=True)
class GuidedSelect:
    """Blocks by their best token for the question's last rows; all chunks compete directly.

    max_kept_ratio: kept tokens as a share of the context, filled by score at every layer.
    min_tokens: the budget is never below this many tokens; of a short context there is nothing to
        save by leaving half of it out.
    window: last prompt rows that ask (1: the last token alone; None: the whole last segment).
    probe: ``probe`` or ``layerwise``, see `Select`.
    probe_over: blocks that the probe reads.
    always: blocks kept whatever their score; they count against the budget.
    score: ``keys`` (from their codes) or ``summaries`` (block means).
    after: tokens that share the score of the one before them. What the question asks for begins at
        the found token and goes on; without this, names are cut at a block's end.
    bias: personalised bias of SamKV's equation 1 on the asking rows.
    rotated: compare at true positions instead of position-free.
    shared: one choice for all layers, by the sum of their scores; False: per layer.

    Deviations from SamKV: query, score and budget as above, no dynamic share P.
    """

    max_kept_ratio: float = 0.2
    min_tokens: int = 64
    window: int | None = 1
    probe: Probe = "layerwise"
    probe_over: Blocks = "none"
    always: Blocks = "none"
    score: Literal["keys", "summaries"] = "keys"
    after: int = 4
    bias: bool = False
    rotated: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        check_ratio("max_kept_ratio", self.max_kept_ratio)
        if self.window is not None and self.window < 1:
            raise InvalidOption(f"window={self.window}; it must be at least 1")
        if self.probe not in ("probe", "layerwise"):
            raise InvalidOption(f"probe={self.probe!r}; allowed: probe, layerwise")
        if self.score not in ("keys", "summaries"):
            raise InvalidOption(f"score={self.score!r}; allowed: keys, summaries")
        for name, count in (("after", self.after), ("min_tokens", self.min_tokens)):
            if count < 0:
                raise InvalidOption(f"{name}={count}; it must be 0 or more")
        for name, value in (("probe_over", self.probe_over), ("always", self.always)):
            if value not in ("none", "initial", "anchors"):
                raise InvalidOption(f"{name}={value!r}; allowed: none, initial, anchors")
        if self.probe_over != "none" and self.probe == "layerwise":
            raise InvalidOption(f"probe_over={self.probe_over!r} needs probe='probe'")
        if self.shared and self.probe == "layerwise":
            raise InvalidOption("shared=True needs probe='probe': all layers' scores at once")

    @property
    def reads(self) -> frozenset[str]:
        scored = ("keys",) if self.score == "keys" else ("summaries", "anchor_summaries")
        return frozenset((*scored, *(("local_query",) if self.bias else ())))

    def probe_blocks(self, layout: Layout) -> Tensor:
        return _blocks(self.probe_over, layout)

    def choose(self, queries: Tensor | None, evidence: Evidence, layout: Layout) -> Selection:
        assert queries is not None
        scores = self._token_scores(queries, evidence, layout)  # (L, Tctx)
        ranked = scores.sum(0, keepdim=True) if self.shared else scores
        ranked = self._spread(ranked, layout)
        index = layout.block_of_token.to(scores.device).expand_as(ranked)
        order = torch.full((len(ranked), layout.n_blocks), -math.inf, device=scores.device)
        order = order.scatter_reduce(1, index, ranked, "amax")
        always = _blocks(self.always, layout)
        order = order.masked_fill(always.to(order.device), math.inf)
        budget = max(self.max_kept_ratio * layout.n_context, self.min_tokens)
        keep = fill_budget(order, layout, budget).cpu() | always
        return Selection(keep=keep.expand(evidence.n_layers, -1), token_scores=scores)

    def _spread(self, scores: Tensor, layout: Layout) -> Tensor:
        """(L, Tctx): each token's best score among itself and the `after` tokens before it."""
        chunk = layout.chunk_of_token.to(scores.device)
        best = scores
        for shift in range(1, min(self.after, layout.n_context - 1) + 1):
            same = chunk[shift:] == chunk[:-shift]
            moved = scores[:, :-shift].where(same, 0.0)
            best = torch.cat((best[:, :shift], best[:, shift:].maximum(moved)), dim=1)
        return best

    def _token_scores(self, queries: Tensor, evidence: Evidence, layout: Layout) -> Tensor:
        """(L, Tctx): attention of the asking rows to each context token.

        Softmax per head over all chunks together, summed over heads, mean over rows. A block's
        summary stands for all its tokens.
        """
        keys = evidence.keys if self.score == "keys" else evidence.summaries
        assert keys is not None
        if self.score == "summaries":
            keys = keys[:, layout.block_of_token.to(keys.device)]
        n_layers, n_heads, window, dim = queries.shape
        asking = queries.transpose(1, 2)[:, None]  # (L, 1, W, H, D), one for all chunks
        if self.bias:
            assert evidence.local_query is not None
            rows = [personalise(queries[:, :, w], evidence.local_query) for w in range(window)]
            asking = torch.stack(rows, dim=2)  # (L, C, W, H, D), one for each chunk
        if self.rotated:
            assert evidence.context_cos is not None and evidence.context_sin is not None
            assert evidence.question_cos is not None and evidence.question_sin is not None
            keys = rotate(keys, evidence.context_cos, evidence.context_sin)
            asking = rotate(asking, evidence.question_cos, evidence.question_sin)
        grouped = asking.reshape(*asking.shape[:3], keys.shape[2], -1, dim)  # (L, C, W, G, H/G, D)
        if self.bias:
            own = grouped[:, layout.chunk_of_token.to(keys.device)]
            logits = torch.einsum("ltwgrd,ltgd->lwgrt", own, keys)
        else:
            logits = torch.einsum("lwgrd,ltgd->lwgrt", grouped[:, 0], keys)
        weights = (logits / math.sqrt(dim)).softmax(-1)
        return weights.sum((2, 3)).mean(1)


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute:
    """The kept tokens that the question attends to most, and the first tokens of each chunk.

    ratio: recomputed rows as a share of the context, the cap on both together.
    heads: first tokens of each chunk that are taken before any other (EPIC's choice).
    """

    ratio: float = 0.0
    heads: int = 0

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        if self.heads < 0:
            raise InvalidOption(f"heads={self.heads}; it must be 0 or more")
        if self.heads and not self.ratio:
            raise InvalidOption(
                f"heads={self.heads} needs a ratio above 0, which caps both together"
            )

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()

    def rows(self, selection: Selection, evidence: Evidence, layout: Layout) -> Tensor:
        kept = selection.tokens(layout)
        budget = int(self.ratio * layout.n_context)
        if not budget:
            return torch.zeros_like(kept)
        assert selection.token_scores is not None
        asked = (selection.token_scores.cpu() * kept).sum(0)  # (Tctx,)
        asked = asked.masked_fill(layout.offset_in_chunk < self.heads, math.inf)
        allowed = kept.any(0) & ~layout.exact[layout.chunk_of_token]
        order = asked.masked_fill(~allowed, -math.inf).topk(min(budget, layout.n_context)).indices
        rows = torch.zeros(layout.n_context, dtype=torch.bool)
        rows[order] = True
        return kept & (rows & allowed)


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/decisions.md)."""
    return Method(
        name="samkv-guided",
        paper="ours, after arXiv 2508.11661",
        summary="blocks that the last prompt token asks for, over all chunks at once",
        select=GuidedSelect(),
        recompute=GuidedRecompute(),
        update=overwrite,
    )

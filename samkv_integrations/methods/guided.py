"""SamKV's frame with the last token's question and real keys: the engine's default.

Ours. From SamKV (arXiv 2508.11661): blocks chosen across chunks, partial recomputation in row sets
that shrink with depth, and as options its personalised bias and fusion. From SAGE-KV (arXiv
2503.08879): the last prompt token knows what it is looking for. From A3: recompute what the
question attends to, but chunk by chunk.
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
    Recompute,
    Select,
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
class GuidedSelect(Select):
    """Blocks by their best token for the question's last rows; all chunks compete directly.

    max_kept_ratio: what the answer goes on with, as a share of the context, filled by score.
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
    shared: one choice for all layers, by the best score in their upper half, because the lower
        layers of an answer's later tokens need what the upper ones found; False: per layer.
    reads_ratio: what a pass reads at a layer, as a share of the context: the best for all rows
        of the question and those computed again, each by its own attention; of the latter the
        heads that share a key ask with their mean. Only with ``layerwise``.

    Deviations from SamKV: query, score and budget as above, no dynamic share P.
    """

    max_kept_ratio: float = 0.2
    min_tokens: int = 48
    window: int | None = 1
    probe: Probe = "layerwise"
    probe_over: Blocks = "none"
    always: Blocks = "none"
    score: Literal["keys", "summaries"] = "keys"
    after: int = 4
    bias: bool = False
    rotated: bool = True
    shared: bool = True
    reads_ratio: float = 0.4

    def __post_init__(self) -> None:
        check_ratio("max_kept_ratio", self.max_kept_ratio)
        check_ratio("reads_ratio", self.reads_ratio)
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
        if self.probe == "layerwise" and not self.reads_ratio:
            raise InvalidOption(
                "reads_ratio=0 leaves the question nothing to read; allowed: above 0"
            )

    @property
    def reads(self) -> frozenset[str]:
        found = {"keys"} if self.score == "keys" or self.probe == "layerwise" else set()
        found |= {"summaries", "anchor_summaries"} if self.score == "summaries" else set()
        return frozenset(found | ({"local_query"} if self.bias else set()))

    def probe_blocks(self, layout: Layout) -> Tensor:
        return _blocks(self.probe_over, layout)

    def choose(self, queries: Tensor | None, evidence: Evidence, layout: Layout) -> Selection:
        assert queries is not None
        logits = self._logits(queries, evidence, layout)  # (L, W, H, Tctx)
        scores = logits.softmax(-1).sum(2).mean(1)
        ranked = scores[len(scores) // 2 :].amax(0, keepdim=True) if self.shared else scores
        order = best_of_block(spread(ranked, layout, after=self.after), layout)
        always = _blocks(self.always, layout)
        order = order.masked_fill(always.to(order.device), math.inf)
        budget = max(self.max_kept_ratio * layout.n_context, self.min_tokens)
        keep = fill_budget(order, layout, budget).cpu() | always
        return Selection(
            keep=keep.expand(evidence.n_layers, -1),
            token_scores=scores,
            chunk_scores=softmax_by_chunk(logits, layout).amax((1, 2)),
        )

    def read(self, queries: Tensor, seen: Tensor, evidence: Evidence, layout: Layout) -> Tensor:
        assert evidence.keys is not None
        keys, asking = rotated(evidence.keys, queries.transpose(0, 1), evidence)
        n_groups, dim = keys.shape[2:]
        grouped = asking.reshape(len(seen), n_groups, -1, dim)  # (n, G, H/G, D)
        n_question, n_sharing = len(layout.question), grouped.shape[2]
        scores = _wanted(grouped[:n_question], seen[:n_question], keys[0])
        if len(seen) > n_question:  # many rows: the heads that share a key ask as one
            together = grouped[n_question:].mean(2, keepdim=True)
            again = _wanted(together, seen[n_question:], keys[0]) * n_sharing
            scores = scores.maximum(again)
        budget = max(self.reads_ratio * layout.n_context, self.min_tokens)
        return fill_budget(best_of_block(scores[None], layout), layout, budget)[0].cpu()

    def _logits(self, queries: Tensor, evidence: Evidence, layout: Layout) -> Tensor:
        """(L, W, H, Tctx) logits of the asking rows; a summary stands for all tokens of a block."""
        keys = evidence.keys if self.score == "keys" else evidence.summaries
        assert keys is not None
        if self.score == "summaries":
            keys = keys[:, layout.block_of_token.to(keys.device)]
        asking = queries.transpose(1, 2)[:, None]  # (L, 1, W, H, D), one for all chunks
        if self.bias:
            assert evidence.local_query is not None
            rows = [
                personalise(queries[:, :, w], evidence.local_query) for w in range(queries.shape[2])
            ]
            asking = torch.stack(rows, dim=2)  # (L, C, W, H, D), one for each chunk
        if self.rotated:
            keys, asking = rotated(keys, asking, evidence)
        grouped = asking.reshape(
            *asking.shape[:3], keys.shape[2], -1, keys.shape[3]
        )  # (L, C, W, G, H/G, D)
        if self.bias:
            own = grouped[:, layout.chunk_of_token.to(keys.device)]
            logits = torch.einsum("ltwgrd,ltgd->lwgrt", own, keys)
        else:
            logits = torch.einsum("lwgrd,ltgd->lwgrt", grouped[:, 0], keys)
        return logits.flatten(2, 3) / math.sqrt(queries.shape[-1])


def _wanted(asking: Tensor, seen: Tensor, keys: Tensor) -> Tensor:
    """(Tctx,): the most attention, summed over heads, that one of the rows gives to each token.

    asking (n, G, H/G, D), seen (n,) tokens that each row may see, keys (Tctx, G, D).
    """
    logits = torch.einsum("ngrd,tgd->ngrt", asking, keys) / math.sqrt(keys.shape[2])
    later = torch.arange(len(keys)) >= seen[:, None]
    logits.masked_fill_(later.to(keys.device)[:, None, None], -math.inf)
    return logits.softmax(-1).nan_to_num_(0.0).sum((1, 2)).amax(0)


def rotated(keys: Tensor, asking: Tensor, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Keys (L, Tctx, G, D) and queries (..., W, H, D) at their true positions."""
    assert evidence.context_cos is not None and evidence.context_sin is not None
    assert evidence.question_cos is not None and evidence.question_sin is not None
    return (
        rotate(keys, evidence.context_cos, evidence.context_sin),
        rotate(asking, evidence.question_cos, evidence.question_sin),
    )


def best_of_block(scores: Tensor, layout: Layout) -> Tensor:
    """(L, Nb): the best of the (L, Tctx) scores in each block."""
    index = layout.block_of_token.to(scores.device).expand_as(scores)
    order = scores.new_full((len(scores), layout.n_blocks), -math.inf)
    return order.scatter_reduce(1, index, scores, "amax")


def spread(scores: Tensor, layout: Layout, *, before: int = 0, after: int = 0) -> Tensor:
    """(L, Tctx) scores shared with the ``before`` and ``after`` tokens around, within the chunk."""
    chunk = layout.chunk_of_token.to(scores.device)
    best = scores
    for shift in range(1, min(max(before, after), layout.n_context - 1) + 1):
        same = chunk[shift:] == chunk[:-shift]
        if shift <= after:
            moved = scores[:, :-shift].where(same, -math.inf)
            best = torch.cat((best[:, :shift], best[:, shift:].maximum(moved)), dim=1)
        if shift <= before:
            moved = scores[:, shift:].where(same, -math.inf)
            best = torch.cat((best[:, :-shift].maximum(moved), best[:, -shift:]), dim=1)
    return best


def softmax_by_chunk(logits: Tensor, layout: Layout) -> Tensor:
    """Softmax of (..., Tctx) within each chunk, as if it were alone."""
    chunk = layout.chunk_of_token.to(logits.device)
    index = chunk.expand_as(logits)
    shape = (*logits.shape[:-1], layout.n_chunks)
    top = logits.new_full(shape, -math.inf).scatter_reduce(-1, index, logits, "amax")
    weights = (logits - top[..., chunk]).exp()
    total = logits.new_zeros(shape).scatter_add(-1, index, weights)
    return weights / total[..., chunk]


@dataclass(frozen=True, kw_only=True)
class GuidedRecompute(Recompute):
    """The tokens that the question looks for in each chunk by itself.

    A fact that is about "the same company" cannot win against other chunks before it knows which
    company that is. So chunks do not compete here: a token's score is the largest share, over heads
    and the upper half of the layers, of a head's attention to the token's own chunk. The rows then
    look for what they need themselves (``GuidedSelect.reads_ratio``).

    ratio: recomputed rows as a share of the context, mean over layers; 0 for none.
    before, after: tokens around a hit that are computed again with it: the words before it say whom
        it is about, and an answer goes on behind its beginning.
    lead_layers: share of the layers, from the first, in which those before a hit are computed. By
        then they have said it.
    sure: nothing is recomputed where the first token has at least this probability without; None to
        recompute always. It saves time, and loses the facts that the model is wrong about and sure.
    small_context: contexts of at most this many tokens are kept and computed as a whole, which is
        full prefill: one pass over all rows takes no longer than two over few.
    compete: let chunks compete all the same, by the question's attention to the whole context (A3's
        choice, but in the upper layers).
    """

    ratio: float = 0.1
    before: int = 8
    after: int = 2
    lead_layers: float = 0.5
    sure: float | None = None
    small_context: int = 128
    compete: bool = False

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_ratio("lead_layers", self.lead_layers)
        if self.sure is not None:
            check_ratio("sure", self.sure)
        for name in ("before", "after", "small_context"):
            if (count := getattr(self, name)) < 0:
                raise InvalidOption(f"{name}={count}; it must be 0 or more")

    @property
    def unless_sure(self) -> float | None:
        return self.sure

    @property
    def whole_tokens(self) -> int:
        return self.small_context if self.ratio else 0

    def rows(self, selection: Selection, evidence: Evidence, layout: Layout) -> Tensor:
        n_layers = evidence.n_layers
        rows = torch.zeros(n_layers, layout.n_context, dtype=torch.bool)
        if not self.ratio:
            return rows
        scores = selection.token_scores if self.compete else selection.chunk_scores
        assert scores is not None
        hits = scores[n_layers // 2 :].amax(0, keepdim=True).cpu()
        hits = hits.masked_fill(layout.exact[layout.chunk_of_token], -math.inf)
        answering = spread(hits, layout, after=self.after)[0]
        wanted = spread(hits, layout, before=self.before, after=self.after)[0]
        leads_up = wanted > answering
        lower = math.ceil(self.lead_layers * n_layers)
        cost = torch.where(leads_up, lower / n_layers, 1.0)
        order = wanted.argsort(descending=True, stable=True)  # many share the score of one hit
        affordable = cost[order].cumsum(0) <= self.ratio * layout.n_context + 1e-3
        rows[:, order[affordable & ~wanted[order].isneginf()]] = True
        rows[lower:] &= ~leads_up
        return rows


def samkv_guided() -> Method:
    """Our row, with the defaults that measured best (docs/decisions.md)."""
    return Method(
        name="samkv-guided",
        paper="ours, after arXiv 2508.11661",
        summary="blocks that the rows ask for; what each chunk has for the question recomputed",
        select=GuidedSelect(),
        recompute=GuidedRecompute(),
        update=overwrite,
    )

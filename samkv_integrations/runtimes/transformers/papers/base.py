"""The classes that the papers' methods share: parts that choose by tensors of the model.

A `Select` gets `SelectionInputs` and `ProbedLayer`, a `LayerRecompute` gets `SelectionInputs` and
`Checked`, and both get a `TensorLayout`. Parts are pure functions of these.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.methods.base import Recompute, Select, check_ratio
from samkv_integrations.prompt.layout import Layout, Mask
from samkv_integrations.runtimes.transformers.entries.quantise import unrotate
from samkv_integrations.runtimes.transformers.layout import TensorLayout

Update = Callable[[Tensor, Tensor], Tensor]
"""(cached, computed) -> the entries to use, all (R, G, D): keys or values of R tokens."""


@dataclass(frozen=True, kw_only=True)
class SelectionInputs:
    """Data computed at ingest, for all chunks of a request. Only data in a part's `needs` are set.

    Keys and queries are un-rotated.

    block_means: (L, Nb, G, D) float32, mean key of each middle block; 0 for anchor blocks.
    local_query: (L, C, H, D) float32, mean query of each chunk's local tokens.
    anchor_mean: (L, C, G, D) float32, mean key of each chunk's anchor tokens; 0 if the prompt
        contains none.
    block_max, block_min: (L, C) most and least important middle block; -1 for a chunk without
        middle blocks, and if the prompt contains no token of that block.
    outliers: (L, Tctx) bool, middle tokens with outlying attention.
    stable_layers: indices of the layers N* (paper: Appendix A.2).
    """

    n_layers: int
    block_means: Tensor | None = None
    local_query: Tensor | None = None
    anchor_mean: Tensor | None = None
    block_max: Tensor | None = None
    block_min: Tensor | None = None
    outliers: Tensor | None = None
    stable_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProbedLayer:
    """One layer of a probe.

    queries: (H, R, D), after RoPE, of the R tokens that the probe computed. cos, sin: (R, D), RoPE
    at the positions of these tokens.
    """

    queries: Tensor
    cos: Tensor
    sin: Tensor


class AnchorProbe(Select):
    """Selects by the question's mean query, from a probe that attends to the anchor tokens."""

    def probe_blocks(self, layout: TensorLayout) -> Tensor | None:
        return layout.is_anchor

    def score(self, probed: ProbedLayer, layout: TensorLayout) -> Tensor:
        """(H, D) float32: mean un-rotated query of the question's tokens."""
        n_last = len(layout.question)
        queries = probed.queries[:, -n_last:].transpose(0, 1).float()
        return unrotate(queries, probed.cos[-n_last:], probed.sin[-n_last:]).mean(0)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The context tokens that were computed up to the check layer; queries and keys are rotated.

    tokens: (n,) context tokens. keys, values: (n, G, D) as computed. queries: (H, W, D) of the
    question's tokens. scaling: of the attention logits.
    cached: a function that returns the cached keys, at the same positions, and the cached values,
        (n, G, D) each.
    """

    tokens: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    cached: Callable[[], tuple[Tensor, Tensor]]


class LayerRecompute(Recompute):
    """Chooses, layer by layer, the kept tokens to recompute, by tensors of the model."""

    by_layer: ClassVar[bool] = True

    @abstractmethod
    def choose_layers(
        self, kept: Tensor, inputs: SelectionInputs, layout: TensorLayout
    ) -> Tensor: ...

    def choose(self, layout: Layout) -> Mask:
        """Raises InvalidOption: the choice needs more than token ids."""
        raise InvalidOption(
            f"{type(self).__name__} chooses tokens by what the model computes, which only the "
            "transformers runtime can do; choose a method by token ids, such as 'auto'"
        )


@dataclass(frozen=True, kw_only=True)
class RecomputeFrom(LayerRecompute):
    """Recomputes all tokens up to a check layer, and above it the tokens of `choose_after`.

    ratio: share of the context to recompute above the check layer. Exact chunks are never
        recomputed.
    layer: the check layer, counted from 0.
    """

    ratio: float = 0.15
    layer: int = 1

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        if self.layer < 0:
            raise InvalidOption(Given("layer", self.layer), "; it must be 0 or more")

    @property
    def check_layer(self) -> int | None:
        return self.layer

    def choose_layers(self, kept: Tensor, inputs: SelectionInputs, layout: TensorLayout) -> Tensor:
        recomputed = kept & ~layout.exact[layout.chunk_of_token]
        recomputed[self.layer + 1 :] = False
        return recomputed


class ContextAttention(Protocol):
    """A method's own attention, which may treat context tokens and others differently."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        mask: Tensor | None,
        is_context: Tensor,
    ) -> Tensor:
        """(1, H, R, D) from query (1, H, R, D), keys and values (1, G, S, D).

        mask: (R, S) bool, the entries that a token sees; None for all. is_context: (S,) or (G, S).
        """
        ...


# -- scores of tokens and blocks, and budgets that the best of them fill -------------------------


def top_tokens(scores: Tensor, tokens: Tensor, ratio: float, layout: TensorLayout) -> Tensor:
    """(Tctx,) bool, CPU: the ``tokens`` (n,) with the best scores, ``ratio`` of the context."""
    recomputed = torch.zeros(layout.n_context, dtype=torch.bool)
    most = math.ceil(ratio * layout.n_context - 1e-6)  # tolerates rounding errors of floats
    count = min(len(tokens), max(0, most))
    recomputed[tokens[scores.topk(count).indices.cpu()]] = True
    return recomputed


def group_heads(queries: Tensor, n_kv_heads: int) -> Tensor:
    """(..., H, D) -> (..., G, D): mean over the query heads that share a key-value head.

    Consecutive query heads share one, as in transformers' ``repeat_kv``.
    """
    *lead, heads, dim = queries.shape
    return queries.reshape(*lead, n_kv_heads, heads // n_kv_heads, dim).mean(dim=-2)


def fill_budget(order: Tensor, layout: TensorLayout, budget_tokens: float | Tensor) -> Tensor:
    """(L, Nb) bool: the best blocks of each layer, up to ``budget_tokens``.

    order: (L, Nb) scores; a block with -inf is never chosen. Filling ends at the first block that
    does not fit. budget_tokens: one budget for all layers, or (L, 1).
    """
    ranking = order.argsort(dim=1, descending=True, stable=True)
    lengths = layout.block_lengths.to(order.device)[ranking]
    lengths = lengths.masked_fill(order.gather(1, ranking).isneginf(), 0)
    whole = torch.as_tensor(budget_tokens, dtype=torch.float64).floor().long().to(order.device)
    fits = (lengths.cumsum(1) <= whole) & (lengths > 0)
    return torch.zeros_like(fits).scatter(1, ranking, fits)

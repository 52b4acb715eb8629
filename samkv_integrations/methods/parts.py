"""The parts a method is made of, and the trivial ones.

Parts are pure: they see tensors and a layout, never the model, the store or the engine. `select`
says which blocks of which layer to keep, `recompute` which of the kept rows to compute again,
`update` how a recomputed entry and the cached one combine, `positions` where cached keys sit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction.parts import Eviction
from samkv_integrations.layout import Layout, Selection
from samkv_integrations.rope import unrotate

Update = Callable[[Tensor, Tensor], Tensor]
Positions = Literal["global", "local"]
NEEDED = frozenset(("summaries", "local_query", "anchor_mean", "statistics"))


@dataclass(frozen=True, kw_only=True)
class SelectionInputs:
    """What was computed at ingest, of all chunks of a request; only what a part `needs`.

    Blocks and tokens are numbered as in the layout.

    summaries: (L, Nb, G, D) float32, mean un-rotated key of each middle block; 0 for anchor blocks.
    local_query: (L, C, H, D) float32, mean un-rotated query of each chunk's local tokens.
    anchor_mean: (L, C, G, D) float32, mean un-rotated key of each chunk's anchor tokens.
    block_max, block_min: (L, C) most and least important middle block, -1 without a middle.
    outliers: (L, Tctx) bool, middle tokens of outstanding attention.
    stable_layers: indices of the layers N* (paper: Appendix A.2).
    """

    n_layers: int
    summaries: Tensor | None = None
    local_query: Tensor | None = None
    anchor_mean: Tensor | None = None
    block_max: Tensor | None = None
    block_min: Tensor | None = None
    outliers: Tensor | None = None
    stable_layers: tuple[int, ...] = ()

    def to(self, device: torch.device) -> SelectionInputs:
        """The same inputs on ``device``."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class ProbedLayer:
    """One layer of a probe: the queries of the tokens that it computed, and the keys they saw.

    queries: (H, R, D), rotated, of the computed tokens in prompt order. cos, sin: (R, D) of them.
    keys: (n, G, D), rotated, of the context tokens in `Select.probe_blocks`; a last token of the
        prompt is none of them, being computed.
    scaling: of the attention's logits.
    """

    layer: int
    n_layers: int
    queries: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    scaling: float


class Select(ABC):
    """Which blocks of the context to keep at each layer.

    needs: names out of `NEEDED`. Everything needed counts as bytes.
    probes: whether a pass over `probe_blocks` comes first, that `score` looks at layer by layer.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def probes(self) -> bool:
        return False

    def probe_blocks(self, layout: Layout) -> Tensor:
        """(Nb,) bool, blocks that the probe attends to."""
        return torch.zeros(layout.n_blocks, dtype=torch.bool)

    def probe_tokens(self, layout: Layout) -> Tensor:
        """(T,) bool, uncached tokens that the probe computes, the last one among them."""
        return layout.fresh

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor | None:
        """What `choose` is given of a layer; None for nothing. Stays on the device. Pure."""
        return None

    @abstractmethod
    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        """The selection.

        scores: what `score` made of the layers, stacked; None without a probe. Pure.
        """


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a layer made of the context rows that were computed up to it, all rotated.

    tokens: (n,) context tokens. keys, values: (n, G, D) as computed. queries: (H, W, D) of the
    question's rows. scaling: of the attention's logits.
    cached: reads their cached keys, at the positions in use, and values, (n, G, D) each.
    """

    tokens: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    cached: Callable[[], tuple[Tensor, Tensor]]


class Recompute(ABC):
    """Which kept rows to compute again.

    check_layer: the rows of all later layers are decided when the pass is there; None: all rows are
        known before.
    whole_tokens: contexts of at most this many tokens are kept and computed as a whole.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def check_layer(self) -> int | None:
        return None

    @property
    def whole_tokens(self) -> int:
        return 0

    @property
    def uses_caches(self) -> bool:
        """Whether any stored entry is ever used."""
        return True

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        """Recomputed tokens as a share of the context, mean over layers, at most."""
        return 1.0

    @abstractmethod
    def rows(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        """(L, Tctx) bool, CPU; rows that are not kept at a layer are ignored there. Pure."""

    def rows_after(self, checked: Checked, layout: Layout) -> Tensor:
        """(Tctx,) bool, CPU: rows of the layers after ``check_layer``. Pure."""
        raise NotImplementedError


class ContextAttention(Protocol):
    """Attention of fresh rows that treats the context's rows in its own way."""

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

        mask: (R, S) bool, what a row may see; None for all. is_context: (S,) or (G, S) bool.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SelectAll(Select):
    """Keep every block at every layer."""

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        return Selection(keep=torch.ones(inputs.n_layers, layout.n_blocks, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class RecomputeAll(Recompute):
    """Compute every row again: ordinary prefill."""

    @property
    def uses_caches(self) -> bool:
        return False

    def rows(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return selection.tokens(layout)


@dataclass(frozen=True, kw_only=True)
class RecomputeInexact(Recompute):
    """Compute every row again that may differ from ordinary prefill's."""

    def rows(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return selection.tokens(layout) & ~layout.exact[layout.chunk_of_token]


@dataclass(frozen=True, kw_only=True)
class RecomputeNone(Recompute):
    """Use the caches as they are."""

    def rows(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return torch.zeros(len(selection.keep), layout.n_context, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class RecomputeFrom(Recompute):
    """All rows up to a layer, and from there on those that it points out.

    ratio: rows of the later layers as a share of the context. What is exact is never computed.
    layer: the check layer, counted from 0.
    """

    ratio: float = 0.15
    layer: int = 1

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        if self.layer < 0:
            raise InvalidOption(f"layer={self.layer}; it must be 0 or more")

    @property
    def check_layer(self) -> int | None:
        return self.layer

    def rows(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        rows = selection.tokens(layout) & ~layout.exact[layout.chunk_of_token]
        rows[self.layer + 1 :] = False
        return rows


def token_budget(ratio: float, n_tokens: Tensor) -> Tensor:
    """``ratio`` of ``n_tokens``, rounded up; what rounding of floats adds does not count."""
    return (ratio * n_tokens.double() - 1e-6).ceil().clamp(min=0).long()


def top_tokens(scores: Tensor, tokens: Tensor, ratio: float, layout: Layout) -> Tensor:
    """(Tctx,) bool, CPU: the best of ``tokens`` (n,) by scores (n,), ``ratio`` of the context."""
    rows = torch.zeros(layout.n_context, dtype=torch.bool)
    count = min(len(tokens), int(token_budget(ratio, torch.tensor(layout.n_context))))
    rows[tokens[scores.topk(count).indices.cpu()]] = True
    return rows


def overwrite(cached: Tensor, fresh: Tensor) -> Tensor:
    """The recomputed entry replaces the cached one. Both (R, G, D)."""
    return fresh


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Mix of recomputed and cached entry (SamKV equation 4): theta * new + (1 - theta) * old.

    weight: theta; None for the cosine of new and old per token over all heads.
    """

    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_ratio("weight", self.weight)

    def __call__(self, cached: Tensor, fresh: Tensor) -> Tensor:
        """Both (R, G, D); keys at the same position. Returns the dtype of ``fresh``."""
        old, new = cached.float(), fresh.float()
        theta: Tensor | float
        if self.weight is None:
            theta = F.cosine_similarity(new.flatten(1), old.flatten(1), dim=1)[:, None, None]
        else:
            theta = self.weight
        return (theta * new + (1 - theta) * old).to(fresh.dtype)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of answering from chunk caches.

    A row of the table `METHODS`, or an ablation of one made with ``dataclasses.replace``.

    positions: ``global`` (cached keys are rotated to their true positions) or ``local`` (they stay
        where they were prefilled, the papers' Reuse baseline).
    attend: how computed tokens weigh the context against the rest; None as the model does.
    eviction: what the answer's later tokens go on with, unless a call says otherwise; None for all.
    whole_if_faster: compute the whole context where that is estimated to be faster.
    """

    name: str
    paper: str
    summary: str
    select: Select
    recompute: Recompute
    update: Update = overwrite
    positions: Positions = "global"
    attend: ContextAttention | None = None
    eviction: Eviction | None = None
    whole_if_faster: bool = False

    def __post_init__(self) -> None:
        unknown = (self.select.needs | self.recompute.needs) - NEEDED
        if unknown:
            raise InvalidOption(f"method {self.name!r} needs {sorted(unknown)}; known: {NEEDED}")
        if self.positions not in ("global", "local"):
            raise InvalidOption(f"positions={self.positions!r}; allowed: global, local")

    @property
    def needs(self) -> frozenset[str]:
        return self.select.needs | self.recompute.needs


def mean_query(probed: ProbedLayer, n_last: int) -> Tensor:
    """(H, D) float32: mean un-rotated query of the probe's ``n_last`` last tokens."""
    queries = probed.queries[:, -n_last:].transpose(0, 1).float()
    return unrotate(queries, probed.cos[-n_last:], probed.sin[-n_last:]).mean(0)


def group_heads(queries: Tensor, n_kv_heads: int) -> Tensor:
    """(..., H, D) -> (..., G, D): mean over the query heads that share a key-value head.

    Consecutive query heads share one, as in transformers' ``repeat_kv``.
    """
    *lead, heads, dim = queries.shape
    return queries.reshape(*lead, n_kv_heads, heads // n_kv_heads, dim).mean(dim=-2)


def personalise(query: Tensor, local_query: Tensor) -> Tensor:
    """A query of its own for every chunk (SamKV equation 1).

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


def fill_budget(order: Tensor, layout: Layout, budget_tokens: float | Tensor) -> Tensor:
    """(L, Nb) bool: the best blocks of each layer that fit into ``budget_tokens``.

    order: (L, Nb), higher first, -inf never. Filling ends at the first block that does not fit.
    budget_tokens: the same for all layers, or (L, 1).
    """
    ranking = order.argsort(dim=1, descending=True, stable=True)
    lengths = layout.block_lengths.to(order.device)[ranking]
    lengths = lengths.masked_fill(order.gather(1, ranking).isneginf(), 0)
    whole = torch.as_tensor(budget_tokens, dtype=torch.float64).floor().long().to(order.device)
    fits = (lengths.cumsum(1) <= whole) & (lengths > 0)
    return torch.zeros_like(fits).scatter(1, ranking, fits)


def check_ratio(name: str, value: float | None) -> None:
    """Raise InvalidOption unless ``value`` is a share between 0 and 1."""
    if value is None or not 0 <= value <= 1:
        raise InvalidOption(f"{name}={value}; it must be between 0 and 1")


def option_names(method: Method) -> tuple[str, ...]:
    """The knobs of a method's parts, ``select.x``, ``recompute.y`` and ``attend.z``."""
    parts = (("select", method.select), ("recompute", method.recompute), ("attend", method.attend))
    return tuple(
        f"{name}.{field.name}"
        for name, part in parts
        if part is not None
        for field in fields(part)  # type: ignore[arg-type]
    )

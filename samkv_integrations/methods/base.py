"""The interface of a method and of its parts, and the parts that most methods share.

`select` chooses the blocks to keep at each layer, all by default. `recompute` chooses the kept
tokens to compute again, none by default. `update` combines a recomputed entry with the cached one.
`positions` places the cached keys. Parts are pure functions of tensors and a layout; they see
neither the model nor the store nor the engine.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from samkv_integrations.errors import Given, InvalidOption, UnknownOption
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.runtimes.transformers.entries.quantise import unrotate
from samkv_integrations.runtimes.transformers.eviction.base import Eviction

Update = Callable[[Tensor, Tensor], Tensor]
"""(cached, computed) -> the entries to use, all (R, G, D): keys or values of R tokens."""

Positions = Literal["global", "local"]
"""Positions of cached keys: those of the prompt, or those that the chunk was computed at."""

NEEDED = frozenset(("block_means", "local_query", "anchor_mean", "statistics"))
"""What a part may need of a chunk besides its KV entries."""


@dataclass(frozen=True, kw_only=True)
class SelectionInputs:
    """What was computed at ingest, for all chunks of a request; only what a part `needs`.

    Keys and queries are un-rotated.

    block_means: (L, Nb, G, D) float32, mean key of each middle block; 0 for anchor blocks.
    local_query: (L, C, H, D) float32, mean query of each chunk's local tokens.
    anchor_mean: (L, C, G, D) float32, mean key of each chunk's anchor tokens; 0 if the prompt
        contains none.
    block_max, block_min: (L, C) most and least important middle block; -1 without a middle, and if
        the prompt contains no token of that block.
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


class Select(ABC):
    """Chooses the blocks of the context to keep at each layer.

    needs: names in `NEEDED`; each is read from the caches, and counts in ``bytes_read``.
    keeps_all: whether it always keeps every block.
    """

    keeps_all: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def probe_blocks(self, layout: Layout) -> Tensor | None:
        """(Nb,) bool, blocks that a probe attends to: a pass of the uncached tokens, for `score`.

        None, the default, for no probe.
        """
        return None

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor:
        """The scores of a layer of the probe for `choose`, on the device. Pure."""
        raise NotImplementedError

    @abstractmethod
    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Tensor:
        """(L, Nb) bool, CPU: the blocks that each layer keeps. Pure.

        scores: those of all layers, stacked; None without a probe.
        """


@dataclass(frozen=True, kw_only=True)
class SelectAll(Select):
    """Keep every block at every layer."""

    keeps_all: ClassVar[bool] = True

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return torch.ones(inputs.n_layers, layout.n_blocks, dtype=torch.bool)


class AnchorProbe(Select):
    """Selects by the question's mean query, which a pass over the anchor tokens gives."""

    def probe_blocks(self, layout: Layout) -> Tensor | None:
        return layout.is_anchor

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor:
        """(H, D) float32: mean un-rotated query of the question's tokens."""
        n_last = len(layout.question)
        queries = probed.queries[:, -n_last:].transpose(0, 1).float()
        return unrotate(queries, probed.cos[-n_last:], probed.sin[-n_last:]).mean(0)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The context tokens that have been computed up to the check layer, all rotated.

    tokens: (n,) context tokens. keys, values: (n, G, D) as computed. queries: (H, W, D) of the
    question's tokens. scaling: of the attention logits.
    cached: returns the cached keys, at the same positions, and values, (n, G, D) each.
    """

    tokens: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    cached: Callable[[], tuple[Tensor, Tensor]]


class Recompute(ABC):
    """Chooses the kept tokens to compute again.

    uses_caches: whether any stored entry is ever used.
    check_layer: the layer where `choose_after` decides on all later layers; None if `choose`
        decides on every layer before the pass.
    """

    uses_caches: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def check_layer(self) -> int | None:
        return None

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        """An upper bound of the recomputed share of the context."""
        return 1.0

    @abstractmethod
    def choose(self, kept: Tensor, inputs: SelectionInputs, layout: Layout) -> Tensor:
        """(L, Tctx) bool, CPU; a token is ignored at layers that do not keep it. Pure.

        kept: (L, Tctx) bool, CPU, the tokens of the blocks that each layer keeps.
        """

    def choose_again(self, layout: Layout, given: Tensor) -> Tensor:
        """(Tctx,) bool, CPU: tokens of chunks in memory that a follow-up computes again. Pure.

        For its answer alone: what is in memory stays as it is. layout: with the chunks that are in
        memory; its question is what is new. given: (Tctx,) bool, tokens that were not taken from a
        chunk cache.
        """
        return torch.zeros_like(given)

    def choose_after(self, checked: Checked, layout: Layout) -> Tensor:
        """(Tctx,) bool, CPU: the tokens for the layers after ``check_layer``. Pure."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RecomputeNone(Recompute):
    """Recompute nothing."""

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        return 0.0

    def choose(self, kept: Tensor, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return torch.zeros_like(kept)


@dataclass(frozen=True, kw_only=True)
class RecomputeFrom(Recompute):
    """Recompute all tokens up to a check layer, and above it those that `choose_after` picks.

    ratio: share of the context for the layers above. Exact chunks are never recomputed.
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

    def choose(self, kept: Tensor, inputs: SelectionInputs, layout: Layout) -> Tensor:
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


def overwrite(cached: Tensor, computed: Tensor) -> Tensor:
    """The recomputed entry replaces the cached one. Both (R, G, D)."""
    return computed


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of answering from chunk caches; ``dataclasses.replace`` makes variants.

    positions: ``global`` (cached keys are rotated to their positions in the prompt) or ``local``
        (they stay where the chunk was computed, the papers' Reuse baseline).
    attend: the method's own attention; None for the model's.
    eviction: rule for the tokens after the first, unless a call gives one; None to keep all.
    whole_if_faster: compute the whole prompt where that is estimated to be faster.
    else_way: what a report calls it where it is not; empty for its name.
    """

    name: str
    paper: str
    summary: str
    select: Select = SelectAll()
    recompute: Recompute = RecomputeNone()
    update: Update = overwrite
    positions: Positions = "global"
    attend: ContextAttention | None = None
    eviction: Eviction | None = None
    whole_if_faster: bool = False
    else_way: str = ""

    def __post_init__(self) -> None:
        for name, kind in (("select", Select), ("recompute", Recompute)):
            part = getattr(self, name)
            if not isinstance(part, kind):
                hint = f"; did you mean {part.__name__}()?" if isinstance(part, type) else ""
                raise InvalidOption(
                    Given(name, part),
                    f" of method {self.name!r}; it must be an object of a subclass "
                    f"of {kind.__name__}{hint}",
                )
            if not isinstance(part.needs, frozenset) or not part.needs <= NEEDED:
                raise InvalidOption(
                    Given("needs", part.needs),
                    f" of {name} of method {self.name!r}; it must be a "
                    f"frozenset of names out of {', '.join(sorted(NEEDED))}",
                )
        if self.positions not in ("global", "local"):
            raise InvalidOption(Given("positions", self.positions), "; allowed: global, local")

    @property
    def needs(self) -> frozenset[str]:
        return self.select.needs | self.recompute.needs

    @property
    def way(self) -> str:
        """``Report.ran`` of an answer that uses caches."""
        return self.else_way or self.name


def check_ratio(name: str, value: float | None) -> None:
    """Raise InvalidOption unless ``value`` is a share between 0 and 1."""
    if value is None or not 0 <= value <= 1:
        raise InvalidOption(Given(name, value), "; it must be between 0 and 1")


MOST_TOKENS = 2**31
"""Limit of any count: beyond all context windows, and within the range of tensors' integers."""


def check_count(name: str, value: int) -> None:
    """Raise InvalidOption unless ``value`` is a whole number from 0 to `MOST_TOKENS`."""
    if not isinstance(value, int) or isinstance(value, bool) or value > MOST_TOKENS:
        raise InvalidOption(
            Given(name, value), f"; it must be a whole number, at most {MOST_TOKENS}"
        )
    if value < 0:
        raise InvalidOption(Given(name, value), "; it must be 0 or more")


def option_names(method: Method) -> tuple[str, ...]:
    """The options of a method's parts, as ``select.x``, ``recompute.y`` and ``attend.z``."""
    parts = (("select", method.select), ("recompute", method.recompute), ("attend", method.attend))
    return tuple(
        f"{name}.{field.name}"
        for name, part in parts
        if part is not None
        for field in fields(part)  # type: ignore[arg-type]
    )


def with_option(method: Method, setting: str) -> Method:
    """The method with one option changed. setting: ``NAME=VALUE``, with a NAME in `option_names`.

    Raises:
        UnknownOption: the method has no such option.
        InvalidOption: the value has the wrong type, or is out of range.
    """
    name, _, text = setting.partition("=")
    known = option_names(method)
    if name not in known:
        raise UnknownOption.among(f"option of {method.name}", name, known or ("none",))
    part_name, field = name.split(".")
    part: Any = getattr(method, part_name)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text  # a word
    try:
        TypeAdapter(get_type_hints(type(part))[field]).validate_python(value, strict=True)
    except ValidationError as error:
        why = "; or ".join(each["msg"] for each in error.errors())
        raise InvalidOption(Given(name, text), f" of {method.name!r}: {why}") from error
    return replace(method, **{part_name: replace(part, **{field: value})})


# -- scores of tokens and blocks, and budgets that the best of them fill -------------------------


def top_tokens(scores: Tensor, tokens: Tensor, ratio: float, layout: Layout) -> Tensor:
    """(Tctx,) bool, CPU: the ``tokens`` (n,) with the best scores, ``ratio`` of the context."""
    recomputed = torch.zeros(layout.n_context, dtype=torch.bool)
    most = math.ceil(ratio * layout.n_context - 1e-6)  # a tolerance for the error of floats
    count = min(len(tokens), max(0, most))
    recomputed[tokens[scores.topk(count).indices.cpu()]] = True
    return recomputed


def group_heads(queries: Tensor, n_kv_heads: int) -> Tensor:
    """(..., H, D) -> (..., G, D): mean over the query heads that share a key-value head.

    Consecutive query heads share one, as in transformers' ``repeat_kv``.
    """
    *lead, heads, dim = queries.shape
    return queries.reshape(*lead, n_kv_heads, heads // n_kv_heads, dim).mean(dim=-2)


def fill_budget(order: Tensor, layout: Layout, budget_tokens: float | Tensor) -> Tensor:
    """(L, Nb) bool: the best blocks of each layer, up to ``budget_tokens``.

    order: (L, Nb) scores; -inf is never taken. Filling ends at the first block that does not fit.
    budget_tokens: one for all layers, or (L, 1).
    """
    ranking = order.argsort(dim=1, descending=True, stable=True)
    lengths = layout.block_lengths.to(order.device)[ranking]
    lengths = lengths.masked_fill(order.gather(1, ranking).isneginf(), 0)
    whole = torch.as_tensor(budget_tokens, dtype=torch.float64).floor().long().to(order.device)
    fits = (lengths.cumsum(1) <= whole) & (lengths > 0)
    return torch.zeros_like(fits).scatter(1, ranking, fits)

"""The contract of a method, and what its parts see.

Parts are pure: they see tensors and a layout, never the model, the store or the engine. `select`
says which blocks of which layer to keep, `recompute` which of the kept tokens to compute again,
`update` how a recomputed entry and the cached one combine, `positions` where cached keys sit.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.eviction.base import Eviction
from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a method keeps of the context.

    keep: (L, Nb) bool, CPU, blocks kept at each layer.
    """

    keep: Tensor

    @classmethod
    def of_all(cls, n_layers: int, layout: Layout) -> Selection:
        """Every block at every layer."""
        return cls(keep=torch.ones(n_layers, layout.n_blocks, dtype=torch.bool))

    def tokens(self, layout: Layout) -> Tensor:
        """(L, Tctx) bool, tokens kept at each layer."""
        return self.keep[:, layout.block_of_token]


Update = Callable[[Tensor, Tensor], Tensor]
"""(cached, computed), both (R, G, D) -> what takes part: keys or values of R tokens."""

Positions = Literal["global", "local"]
"""Where cached keys sit: at their places in the prompt, or at those of their own prefill."""

NEEDED = frozenset(("block_means", "local_query", "anchor_mean", "statistics"))
"""What the parts of a method may need of a chunk beside its KV entries."""


@dataclass(frozen=True, kw_only=True)
class SelectionInputs:
    """What was computed at ingest, of all chunks of a request; only what a part `needs`.

    Blocks and tokens are numbered as in the layout.

    block_means: (L, Nb, G, D) float32, mean un-rotated key of each middle block; 0 for anchor
        blocks.
    local_query: (L, C, H, D) float32, mean un-rotated query of each chunk's local tokens.
    anchor_mean: (L, C, G, D) float32, mean un-rotated key of each chunk's anchor tokens; 0 if the
        prompt holds none.
    block_max, block_min: (L, C) most and least important middle block, -1 without a middle, and if
        the prompt holds nothing of that block.
    outliers: (L, Tctx) bool, middle tokens of outstanding attention.
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

    queries: (H, R, D), rotated, of the computed tokens in prompt order. cos, sin: (R, D) of them.
    """

    queries: Tensor
    cos: Tensor
    sin: Tensor


class Select(ABC):
    """Which blocks of the context to keep at each layer.

    needs: names out of `NEEDED`. Everything needed counts as bytes.
    probes: whether a pass of the uncached tokens over `probe_blocks` comes first, that `score`
        looks at layer by layer.
    keeps_all: whether it keeps every block, of any context.
    """

    keeps_all: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def probes(self) -> bool:
        return False

    def probe_blocks(self, layout: Layout) -> Tensor:
        """(Nb,) bool, blocks that the probe attends to: all, unless a method reads fewer."""
        return torch.ones(layout.n_blocks, dtype=torch.bool)

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor:
        """What `choose` is given of a layer. Stays on the device. Pure."""
        raise NotImplementedError

    @abstractmethod
    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        """The selection.

        scores: what `score` made of the layers, stacked; None without a probe. Pure.
        """


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a layer made of the context tokens that were computed up to it, all rotated.

    tokens: (n,) context tokens. keys, values: (n, G, D) as computed. queries: (H, W, D) of the
    question's tokens. scaling: of the attention's logits.
    cached: reads their cached keys, at the positions in use, and values, (n, G, D) each.
    """

    tokens: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    cached: Callable[[], tuple[Tensor, Tensor]]


class Recompute(ABC):
    """Which kept tokens to compute again.

    uses_caches: whether any stored entry is ever used.
    check_layer: the tokens of all later layers are decided when the pass is there; None: all tokens
        are known before.
    whole_tokens: contexts of at most this many tokens are kept and computed as a whole.
    """

    uses_caches: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def check_layer(self) -> int | None:
        return None

    @property
    def whole_tokens(self) -> int:
        return 0

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        """Recomputed tokens as a share of the context, mean over layers, at most.

        `auto` alone asks, to weigh a method against full prefill; with 1.0 it never takes the
        method.
        """
        return 1.0

    @abstractmethod
    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        """(L, Tctx) bool, CPU; tokens that are not kept at a layer are ignored there. Pure."""

    def choose_after(self, checked: Checked, layout: Layout) -> Tensor:
        """(Tctx,) bool, CPU: tokens of the layers after ``check_layer``. Pure."""
        raise NotImplementedError


class ContextAttention(Protocol):
    """Attention of uncached tokens that treats the context's tokens in its own way."""

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

        mask: (R, S) bool, what a token may see; None for all. is_context: (S,) or (G, S) bool.
        """
        ...


def overwrite(cached: Tensor, computed: Tensor) -> Tensor:
    """The recomputed entry replaces the cached one. Both (R, G, D)."""
    return computed


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of answering from chunk caches.

    A row of the table `METHODS`, or an ablation of one made with ``dataclasses.replace``.

    positions: ``global`` (cached keys are rotated to their true positions) or ``local`` (they stay
        where they were prefilled, the papers' Reuse baseline).
    attend: how computed tokens weigh the context against the rest; None as the model does.
    eviction: what the answer's later tokens go on with, unless a call says otherwise; None for all.
    whole_if_faster: compute the whole context where that is estimated to be faster.
    else_way: the name of the method that it is where the context is not computed as a whole.
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
    else_way: str = ""

    def __post_init__(self) -> None:
        unknown = (self.select.needs | self.recompute.needs) - NEEDED
        if unknown:
            raise InvalidOption(f"method {self.name!r} needs {sorted(unknown)}; known: {NEEDED}")
        if self.positions not in ("global", "local"):
            raise InvalidOption(f"positions={self.positions!r}; allowed: global, local")

    @property
    def needs(self) -> frozenset[str]:
        return self.select.needs | self.recompute.needs

    @property
    def way(self) -> str:
        """What a report calls an answer that is not full prefill."""
        return self.else_way or self.name


def check_ratio(name: str, value: float | None) -> None:
    """Raise InvalidOption unless ``value`` is a share between 0 and 1."""
    if value is None or not 0 <= value <= 1:
        raise InvalidOption(f"{name}={value}; it must be between 0 and 1")


MOST_TOKENS = 2**31
"""Of any count: beyond every context window, and within what tensors hold."""


def check_count(name: str, value: int, at_least: int = 0) -> None:
    """Raise InvalidOption unless ``value`` is ``at_least`` so many, and a number of tokens."""
    if not isinstance(value, int) or isinstance(value, bool) or value > MOST_TOKENS:
        raise InvalidOption(f"{name}={value!r}; it must be a whole number, at most {MOST_TOKENS}")
    if value < at_least:
        least = "0 or more" if at_least == 0 else f"at least {at_least}"
        raise InvalidOption(f"{name}={value}; it must be {least}")


def option_names(method: Method) -> tuple[str, ...]:
    """The knobs of a method's parts, ``select.x``, ``recompute.y`` and ``attend.z``."""
    parts = (("select", method.select), ("recompute", method.recompute), ("attend", method.attend))
    return tuple(
        f"{name}.{field.name}"
        for name, part in parts
        if part is not None
        for field in fields(part)  # type: ignore[arg-type]
    )


_NAMES = {float: "a number", int: "a whole number", bool: "True or False", type(None): "None"}


def with_option(method: Method, setting: str) -> Method:
    """The method with one option changed. setting: ``NAME=VALUE``, NAME out of `option_names`.

    Raises:
        UnknownOption: it has no such option.
        InvalidOption: a value of the wrong kind, or out of range.
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
    hint = get_type_hints(type(part))[field]
    if not _fits(value, hint):
        raise InvalidOption(f"{name}={text} of {method.name!r}: {value!r} is not {_words(hint)}")
    return replace(method, **{part_name: replace(part, **{field: value})})


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):  # a union
        return any(_fits(value, kind) for kind in get_args(hint))
    return type(value) in ((int, float) if hint is float else (hint,))


def _words(hint: Any) -> str:  # noqa: ANN401
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return " or ".join(map(_words, get_args(hint))) if get_args(hint) else _NAMES[hint]

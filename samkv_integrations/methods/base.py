"""What a method of answering from chunk caches is, and its parts that need token ids alone.

`select` chooses the blocks to keep at each layer, all by default. `recompute` chooses the kept
tokens to compute again, none by default. `update` combines a recomputed entry with the cached one.
`positions` places the cached keys. Parts are pure functions: they see neither the model nor the
store nor the engine.

Any runtime can run a method whose parts choose by token ids. Parts that choose by what a model
computes derive from the classes in `samkv_integrations.runtimes.transformers.papers.base`.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

import numpy as np

from samkv_integrations.errors import Given, InvalidOption, UnknownOption
from samkv_integrations.methods.eviction import Eviction

if TYPE_CHECKING:
    from samkv_integrations.prompt.layout import Layout, Mask

Positions = Literal["global", "local"]
"""Positions of cached keys: in the prompt, or where the chunk was computed."""

NEEDED = frozenset(("block_means", "local_query", "anchor_mean", "statistics"))
"""What a part may need of a chunk besides its KV entries."""


Tensor = Any
"""A tensor of the runtime that runs the method. Only parts that need that runtime look inside."""


class Select(ABC):
    """Chooses the blocks of the context to keep at each layer.

    needs: names in `NEEDED`; each is read from the caches, and counts in ``bytes_read``.
    keeps_all: whether it always keeps every block.
    """

    keeps_all: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def probe_blocks(self, layout: Any) -> Tensor | None:  # noqa: ANN401
        """(Nb,) bool: the blocks that a probe attends to; None, the default, for no probe.

        A probe is a pass of the uncached tokens, for `score`. layout: the runtime's own.
        """
        return None

    def score(self, probed: Any, layout: Any) -> Tensor:  # noqa: ANN401
        """The scores of one layer of the probe, for `choose`, on the device. Pure."""
        raise NotImplementedError

    @abstractmethod
    def choose(self, scores: Tensor | None, inputs: Any, layout: Any) -> Tensor | None:  # noqa: ANN401
        """(L, Nb) bool, CPU: the blocks that each layer keeps; None for all blocks. Pure.

        scores: the results of `score` in all layers, stacked; None without a probe.
        """


@dataclass(frozen=True, kw_only=True)
class SelectAll(Select):
    """Keep every block at every layer."""

    keeps_all: ClassVar[bool] = True

    def choose(self, scores: Tensor | None, inputs: Any, layout: Any) -> None:  # noqa: ANN401
        """None: all blocks."""


class Recompute(ABC):
    """Chooses the context tokens to compute again, by token ids: the same ones at every layer.

    uses_caches: whether it ever uses a stored entry.
    by_layer: whether it chooses for each layer, by what the model computes. Then `choose` cannot
        tell the tokens, and `choose_layers` does.
    check_layer: the layer where `choose_after` decides for all later layers; None for none.
    """

    uses_caches: ClassVar[bool] = True
    by_layer: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        """An upper bound of the recomputed share of the context.

        Estimates take the bound for the share: with 1.0 they see no gain in caches.
        """
        return 1.0

    @property
    def check_layer(self) -> int | None:
        return None

    @property
    def way(self) -> str:
        """The name in reports of a rule that `for_model` has chosen; empty for the method's own."""
        return ""

    def for_model(self, n_parameters: int) -> Recompute:
        """The rule for a model of so many parameters (0 if unknown); itself if all use the same."""
        return self

    @abstractmethod
    def choose(self, layout: Layout) -> Mask:
        """(Tctx,) bool; a token is ignored at layers that do not keep its block. Pure."""

    def choose_layers(self, kept: Tensor, inputs: Any, layout: Any) -> Tensor:  # noqa: ANN401
        """(L, Tctx) bool, CPU; a token is ignored at layers that do not keep it. Pure.

        Called only if `by_layer`. kept: (L, Tctx) bool, CPU, the tokens of the blocks that each
        layer keeps.
        """
        raise NotImplementedError

    def choose_after(self, checked: Any, layout: Any) -> Tensor:  # noqa: ANN401
        """(Tctx,) bool, CPU: the tokens for the layers after ``check_layer``. Pure."""
        raise NotImplementedError

    def choose_again(self, layout: Layout, given: Mask) -> Mask:
        """(Tctx,) bool: tokens of the cached prefix that a follow-up recomputes. Pure.

        They are recomputed for its answer only; the entries in memory do not change. layout: the
        chunks of the cached prefix, with the new tokens as its question. given: (Tctx,) bool,
        tokens whose entries did not come from a chunk cache.
        """
        return np.zeros_like(given)


@dataclass(frozen=True, kw_only=True)
class RecomputeNone(Recompute):
    """Recompute nothing."""

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        return 0.0

    def choose(self, layout: Layout) -> Mask:
        return np.zeros(layout.n_context, np.bool_)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of answering from chunk caches; ``dataclasses.replace`` makes variants.

    update: (cached, computed) -> the entries to use, all (R, G, D), keys or values of R tokens.
        None: the computed entry replaces the cached one.
    positions: ``global`` (cached keys are rotated to their positions in the prompt) or ``local``
        (they stay where the chunk was computed, the papers' Reuse baseline).
    attend: the method's own attention, see ``ContextAttention`` of the transformers runtime; None
        for the model's.
    eviction: rule for the tokens after the first, unless a call gives one; None to keep all.
    else_way: of a method that computes the whole prompt where that is estimated to be faster: its
        name in reports of answers that use caches. Empty for a method that does not compare.
    """

    name: str
    paper: str
    summary: str
    select: Select = SelectAll()
    recompute: Recompute = RecomputeNone()
    update: Callable[[Any, Any], Any] | None = None
    positions: Positions = "global"
    attend: Callable[..., Any] | None = None
    eviction: Eviction | None = None
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
    def is_by_tokens(self) -> bool:
        """Whether any runtime can run it: it needs token ids only, and no result of the model.

        It keeps every block, recomputes the same tokens at every layer, and has neither an update
        nor an attention of its own, nor keys at other positions than those of the prompt.
        """
        return (
            self.select.keeps_all
            and not self.recompute.by_layer
            and not self.needs
            and self.update is None
            and self.attend is None
            and self.positions == "global"
        )

    def for_model(self, n_parameters: int) -> Method:
        """The method for a model of so many parameters (0 if unknown)."""
        recompute = self.recompute.for_model(n_parameters)
        if recompute is self.recompute:
            return self
        else_way = self.else_way and (recompute.way or self.else_way)
        return replace(self, recompute=recompute, else_way=else_way)

    @property
    def whole_if_faster(self) -> bool:
        """Whether it computes the whole prompt where that is estimated to be faster."""
        return bool(self.else_way)

    @property
    def way(self) -> str:
        """``Report.ran`` of an answer that uses caches."""
        return self.else_way or self.name


def check_ratio(name: str, value: float | None) -> None:
    """Raise InvalidOption unless ``value`` is a share between 0 and 1."""
    if value is None or not 0 <= value <= 1:
        raise InvalidOption(Given(name, value), "; it must be between 0 and 1")


MOST_TOKENS = 2**31
"""Limit of any count: beyond all context windows, and within the range of arrays' integers."""


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
    from pydantic import TypeAdapter, ValidationError

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

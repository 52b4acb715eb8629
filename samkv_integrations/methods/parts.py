"""The trivial parts of methods: keep all, compute all or nothing again, mix entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.base import (
    Recompute,
    Select,
    Selection,
    SelectionInputs,
    check_ratio,
)
from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class SelectAll(Select):
    """Keep every block at every layer."""

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        return Selection.of_all(inputs.n_layers, layout)


@dataclass(frozen=True, kw_only=True)
class RecomputeAll(Recompute):
    """Compute every token again: ordinary prefill."""

    @property
    def uses_caches(self) -> bool:
        return False

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return selection.tokens(layout)


@dataclass(frozen=True, kw_only=True)
class RecomputeInexact(Recompute):
    """Compute every token again that may differ from ordinary prefill's."""

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return selection.tokens(layout) & ~layout.exact[layout.chunk_of_token]


@dataclass(frozen=True, kw_only=True)
class RecomputeNone(Recompute):
    """Use the caches as they are."""

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return torch.zeros(len(selection.keep), layout.n_context, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class RecomputeFrom(Recompute):
    """All tokens up to a layer, and from there on those that it points out.

    ratio: tokens of the later layers as a share of the context. What is exact is never computed.
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

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        recomputed = selection.tokens(layout) & ~layout.exact[layout.chunk_of_token]
        recomputed[self.layer + 1 :] = False
        return recomputed


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Mix of recomputed and cached entry (SamKV equation 4): theta * new + (1 - theta) * old.

    weight: theta; None for the cosine of new and old per token over all heads.
    """

    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_ratio("weight", self.weight)

    def __call__(self, cached: Tensor, computed: Tensor) -> Tensor:
        """Both (R, G, D); keys at the same position. Returns the dtype of ``computed``."""
        old, new = cached.float(), computed.float()
        theta: Tensor | float
        if self.weight is None:
            theta = F.cosine_similarity(new.flatten(1), old.flatten(1), dim=1)[:, None, None]
        else:
            theta = self.weight
        return (theta * new + (1 - theta) * old).to(computed.dtype)

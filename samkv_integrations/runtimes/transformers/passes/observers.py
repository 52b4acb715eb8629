"""The observers of a method: what it scores in a probe, and what it decides at its check layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.papers.base import (
    BlockSelect,
    Checked,
    LayerRecompute,
    ProbedLayer,
)
from samkv_integrations.runtimes.transformers.passes.blend import ObservedLayer, PassPlan
from samkv_integrations.runtimes.transformers.passes.loader import Context


@dataclass(kw_only=True)
class Probe:
    """Scores each layer of a probe for a selection.

    rotation: of all T positions. device: where the scores of all layers go.
    """

    select: BlockSelect
    layout: TensorLayout
    rotation: Rotation
    device: torch.device
    of_layers: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: ObservedLayer) -> None:
        at = layer.plan.positions[: layer.plan.n_computed]
        cos, sin = (side[at] for side in self.rotation.of(layer.number))
        probed = ProbedLayer(queries=layer.queries[0], cos=cos, sin=sin)
        self.of_layers.append(self.select.score(probed, self.layout).to(self.device))

    @property
    def scores(self) -> Tensor:
        """The scores of all layers, stacked."""
        return torch.stack(self.of_layers)


@dataclass(kw_only=True)
class Check:
    """Lets a recomputation choose the tokens of all later layers, at its check layer.

    context: has the cached entries. replan: (Tctx,) bool, the tokens that later layers compute ->
    the plan. plan: that plan, once it is made.
    """

    recompute: LayerRecompute
    layout: TensorLayout
    context: Context
    replan: Callable[[Tensor], PassPlan]
    plan: PassPlan | None = None

    def __call__(self, layer: ObservedLayer) -> PassPlan | None:
        if layer.number != self.recompute.check_layer:
            return None
        tokens, rows = layer.plan.carried, layer.plan.carried_rows
        keys, values = layer.computed
        checked = Checked(
            tokens=tokens, queries=layer.queries[0][:, -len(self.layout.question) :],
            keys=keys[rows], values=values[rows], scaling=layer.scaling,
            cached=lambda: self.context.keys_and_values(layer.number, tokens.to(keys.device)),
        )  # fmt: skip
        self.plan = self.replan(self.recompute.choose_after(checked, self.layout))
        return self.plan

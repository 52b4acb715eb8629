"""How a pass follows a method: the kept blocks, the recomputed tokens, and its observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.base import Method, Recompute, Select
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.papers.base import (
    Checked,
    ProbedLayer,
    SelectionInputs,
)
from samkv_integrations.runtimes.transformers.passes.blend import ObservedLayer
from samkv_integrations.runtimes.transformers.passes.loader import CachedEntries
from samkv_integrations.runtimes.transformers.passes.pass_plan import PassPlan


def kept_blocks(
    method: Method, scores: Tensor | None, inputs: SelectionInputs, layout: TensorLayout
) -> Tensor:
    """(L, Nb) bool: the blocks that each layer keeps.

    Raises InvalidOption if the choice has another shape (which might be broadcast).
    """
    shape = inputs.n_layers, layout.n_blocks
    chosen = method.select.choose(scores, inputs, layout)
    if chosen is None:
        return torch.ones(shape, dtype=torch.bool)
    return _of_shape(method, "select", chosen, shape)


def recomputed_tokens(
    method: Method, keep: Tensor, inputs: SelectionInputs, layout: TensorLayout
) -> Tensor:
    """(L, Tctx) bool: the tokens to recompute. keep: (L, Nb) bool, see `kept_blocks`.

    Raises InvalidOption if the choice has another shape.
    """
    n_layers, part = inputs.n_layers, method.recompute
    if part.by_layer:
        chosen = part.choose_layers(keep[:, layout.block_of_token], inputs, layout)
        return _of_shape(method, "recompute", chosen, (n_layers, layout.n_context))
    by_tokens = torch.from_numpy(part.choose(layout.arrays))
    return _of_shape(method, "recompute", by_tokens, (layout.n_context,)).repeat(n_layers, 1)


def _of_shape(method: Method, part: str, chosen: Tensor, shape: tuple[int, ...]) -> Tensor:
    if chosen.shape != shape:
        layers_first = ", layers first" if len(shape) == 2 else ""
        raise InvalidOption(
            f"method {method.name!r}: its {part} part chose with shape {tuple(chosen.shape)}; it "
            f"must be {shape}{layers_first}"
        )
    return chosen


@dataclass(kw_only=True)
class Probe:
    """Scores each layer of a probe for a selection.

    rotation: that of all T positions. device: receives the scores of all layers.
    """

    select: Select
    layout: TensorLayout
    rotation: Rotation
    device: torch.device
    of_layers: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: ObservedLayer) -> None:
        computed = layer.plan.computed
        positions = computed.positions[: computed.n_tokens]
        cos, sin = (side[positions] for side in self.rotation.of(layer.number))
        probed = ProbedLayer(queries=layer.queries[0], cos=cos, sin=sin)
        self.of_layers.append(self.select.score(probed, self.layout).to(self.device))

    @property
    def scores(self) -> Tensor:
        """The scores of all layers, stacked."""
        return torch.stack(self.of_layers)


@dataclass(kw_only=True)
class Check:
    """Observes the check layer of a recomputation, which there chooses the tokens of later layers.

    cached: the stored entries. replan: (Tctx,) bool, the tokens that later layers compute ->
    the new plan. plan: the new plan; None before the check layer.
    """

    recompute: Recompute
    layout: TensorLayout
    cached: CachedEntries
    replan: Callable[[Tensor], PassPlan]
    plan: PassPlan | None = None

    def __call__(self, layer: ObservedLayer) -> PassPlan | None:
        if layer.number != self.recompute.check_layer:
            return None
        tokens, rows = layer.plan.computed.context, layer.plan.computed.context_rows
        keys, values = layer.computed
        checked = Checked(
            tokens=tokens, queries=layer.queries[0][:, -len(self.layout.question) :],
            keys=keys[rows], values=values[rows], scaling=layer.scaling,
            cached=lambda: self.cached.keys_and_values(layer.number, tokens.to(keys.device)),
        )  # fmt: skip
        self.plan = self.replan(self.recompute.choose_after(checked, self.layout))
        return self.plan

"""One pass through the layers: planned tokens are computed, everything else is taken as stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from samkv_integrations.engine.plan import LayerPlan, PassPlan
from samkv_integrations.engine.prefix_cache import NewPrefix, Prefix
from samkv_integrations.engine.watch import Watch
from samkv_integrations.engine.working_cache import LayerEntries, WorkingCache, as_heads, room_for
from samkv_integrations.methods.base import (
    Checked,
    ContextAttention,
    ProbedLayer,
    Update,
    overwrite,
)
from samkv_integrations.model.attention import attention
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout

Observe = Callable[[ProbedLayer], None]
"""Looks at a layer of a probe."""

Decide = Callable[[Checked], PassPlan]
"""Decides at a layer what all later ones do."""


class Stored(Protocol):
    """Where a pass finds the entries that it does not compute."""

    def keys_and_values(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys at their positions, and values, (n, G, D) each, of context tokens (n,)."""
        ...

    def release(self, layer: int) -> None:
        """The request is done with a layer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Blend:
    """A pass of one request; `run` it once, or go `through_layers` where no token is wanted.

    cos, sin: (T, D) of all positions.
    update: how a recomputed entry and the stored one combine. weigh: how computed tokens weigh the
    context against the rest, None as the model does.
    held: entries of the prompt's first tokens, for a plan that takes them from memory. leaves:
    takes those that the next prompt may begin with.
    cache: takes what the pass leaves at a layer. observe: looks at each layer instead.
    check: a layer, and who decides there what all later layers do. watch: sees every layer.
    """

    model: Model
    layout: Layout
    context: Stored
    cos: Tensor
    sin: Tensor
    update: Update = overwrite
    weigh: ContextAttention | None = None
    held: Prefix | None = None
    leaves: NewPrefix | None = None
    cache: WorkingCache | None = None
    observe: Observe | None = None
    check: tuple[int, Decide] | None = None
    watch: Watch | None = None

    def run(self, plan: PassPlan) -> Tensor:
        """Logits (vocabulary,) of the last token. Its stored entries must have been loaded."""
        return self.model.logits(self.through_layers(plan)[0, -1:])[0]

    def through_layers(self, plan: PassPlan) -> Tensor:
        """(1, R, hidden size) what the last layer makes of the tokens that it computes."""
        layers = list(plan.layers)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            if self.check is not None and layer == self.check[0]:
                checked = self._checked(layers[layer], layer, query, key, value, scaling)
                layers[layer + 1 :] = self.check[1](checked).layers[layer + 1 :]
            return self._layer(layer, layers[layer], query, key, value, scaling)

        positions = layers[0].positions
        hidden = self.model.embed(self.layout.token_ids.to(self.cos.device)[positions])[None]
        for layer in range(self.model.n_layers):
            if (narrow := layers[layer].narrow) is not None:
                hidden = hidden.index_select(1, narrow)
            at = layers[layer].positions
            hidden = self.model.layer(layer, hidden, self.cos[at], self.sin[at], attend)
        return hidden

    def _layer(
        self, layer: int, plan: LayerPlan, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        stored = self.context.keys_and_values(layer, plan.cached)
        computed = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        held = () if self.held is None else self.held.of_layer(layer, plan.n_held)
        keys, values = (
            self._assemble(plan, sides)
            for sides in zip(*filter(None, (held, stored, computed)), strict=True)
        )
        if self.observe is not None:
            at = plan.positions
            probed = ProbedLayer(
                layer=layer, n_layers=self.model.n_layers, queries=query[0], cos=self.cos[at],
                sin=self.sin[at], keys=stored[0], scaling=scaling,
            )  # fmt: skip
            self.observe(probed)
        if self.watch is not None:
            seen = keys[: plan.n_entries]
            self.watch.see_layer(layer, self.layout, plan, query[0, :, -1], seen, scaling)
        as_rows = (as_heads(keys[: plan.n_entries]), as_heads(values[: plan.n_entries]))
        if self.weigh is not None:
            output = self.weigh(query, *as_rows, scaling, plan.mask, plan.is_context)
        else:
            causal = plan.mask is None and plan.n_entries > 1
            output = attention(query, *as_rows, scaling, plan.mask, causal)
        if self.leaves is not None:
            self.leaves.take(keys, values)
        if self.cache is not None:
            self.cache.take(layer, self._entries(layer, plan, keys, values, query[0], scaling))
            self.context.release(layer)
        return output

    def _assemble(self, plan: LayerPlan, sides: tuple[Tensor, ...]) -> Tensor:
        """(S + room, G, D) from the keys, or values, that were held, stored and computed.

        sides: (n, G, D) each, those that were computed last.
        """
        room, computed = 0 if self.cache is None else self.cache.room, sides[-1]
        entries = room_for(plan.n_entries + room, computed)
        mixed_up = len(plan.cached) or plan.n_held  # else all are computed, in prompt order
        entries[: plan.n_entries] = (
            torch.cat(sides).index_select(0, plan.source) if mixed_up else computed
        )
        if len(plan.mixed):
            entries[plan.mixed_slots] = self.update(entries[plan.mixed_slots], computed[plan.mixed])
        return entries

    def _checked(
        self, plan: LayerPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Checked:
        """What the check sees: the context tokens computed so far, and the question's queries."""
        return Checked(
            tokens=plan.carried,
            queries=query[0][:, -len(self.layout.question) :],
            keys=key[0].transpose(0, 1)[plan.carried_rows],
            values=value[0].transpose(0, 1)[plan.carried_rows],
            scaling=scaling,
            cached=lambda: self.context.keys_and_values(layer, plan.carried.to(key.device)),
        )

    def _entries(
        self,
        layer: int,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        scaling: float,
    ) -> LayerEntries:
        """What stays of a layer."""
        n_entries, is_context = plan.n_entries, plan.is_context
        if plan.staying is not None:
            room, n_entries = len(keys) - n_entries, len(plan.staying)
            before = (keys, values)
            keys, values = (room_for(n_entries + room, side) for side in before)
            keys[:n_entries], values[:n_entries] = (
                side.index_select(0, plan.staying) for side in before
            )
            is_context = is_context[plan.staying]
        return LayerEntries(
            keys=keys, values=values, n_entries=n_entries, is_context=is_context,
            context=plan.context, context_slots=plan.context_slots, changed=plan.changed,
            other_slots=plan.other_slots, queries=queries[:, plan.query_rows],
            query_slots=plan.query_slots, scaling=scaling,
        )  # fmt: skip

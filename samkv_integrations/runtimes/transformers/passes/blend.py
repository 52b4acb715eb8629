"""`Blend`: one pass through the model's own layers, over computed and cached tokens.

It follows a plan of `pass_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.methods.base import Method
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.model.threads import (
    on_all_threads,
    small_operations_on_one_thread,
)
from samkv_integrations.runtimes.transformers.passes.loader import CachedEntries
from samkv_integrations.runtimes.transformers.passes.pass_plan import LayerPlan, PassPlan
from samkv_integrations.runtimes.transformers.passes.pause import Pause, no_pause
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    CopiedEntries,
    LayerEntries,
    LayerwiseEntries,
    WorkingCache,
    as_heads,
    rooms_for,
)


@dataclass(frozen=True, kw_only=True)
class ObservedLayer:
    """The tensors of one layer before its attention; queries and keys are rotated.

    number: index of the layer, from 0. plan: the plan of the layer.
    queries: (1, H, R, D) of the computed tokens; computed: their keys and values, (R, G, D) each.
    keys: (S, G, D) of all entries that the layer attends to.
    scaling, mask: those of the layer's attention; mask (R, S), see `LayerPlan.masks`, or None.
    """

    number: int
    plan: LayerPlan
    queries: Tensor
    computed: tuple[Tensor, Tensor]
    keys: Tensor
    scaling: float
    mask: Tensor | None


class Observer(Protocol):
    """Sees each layer of a pass, and may change the plan of later layers."""

    def __call__(self, layer: ObservedLayer) -> PassPlan | None:
        """The plan to follow from the next layer on; None to keep the present plan."""
        ...


@dataclass(frozen=True, kw_only=True)
class Blend:
    """The pass of one request. Call `run`, or `through_layers` if no logits are needed.

    cached: the stored entries. rotation: that of all T positions.
    method: its `update` and `attend` are used. held: the entries of the cached prefix, from a kept
    sequence; None without one. prefix_to_fill: receives copies of the entries that later prompts
    may take, if the cache will not have these entries; None if none are needed.
    is_exact: whether later prompts may take the entries of this pass as equal to full prefill's;
    then no scores are rounded for speed.
    cache: receives the entries of each layer for the answer; None in a probe. observers: see each
    layer. pause: called before each layer. It may run other passes, and may raise.
    """

    model: LayeredModel
    cached: CachedEntries
    rotation: Rotation
    method: Method
    held: LayerwiseEntries | None = None
    prefix_to_fill: CopiedEntries | None = None
    is_exact: bool = False
    cache: WorkingCache | None = None
    observers: tuple[Observer, ...] = ()
    pause: Pause = no_pause

    def run(self, plan: PassPlan) -> Tensor:
        """Logits (vocabulary,) of the last token. The plan's blocks must have been loaded."""
        return self.model.logits(self.through_layers(plan)[0, -1:])[0]

    def through_layers(self, plan: PassPlan) -> Tensor:
        """(1, R, hidden size): output of the last layer for the tokens that it computes."""
        layers = list(plan.layers)
        attend = partial(self._attend, layers)
        positions = layers[0].computed.positions
        token_ids = self.cached.layout.token_ids.to(positions.device)[positions]
        hidden = self.model.embed(token_ids)[None]
        turns: dict[int, tuple[Tensor, Tensor]] = {}  # by rotation, for layers with the same plan
        for layer in range(self.model.n_layers):
            self.pause()
            computed, kind = layers[layer].computed, self.rotation.kinds[layer]
            if layer == 0 or computed.positions is not layers[layer - 1].computed.positions:
                turns = {}
            if kind not in turns:
                cos, sin = self.rotation.of(layer)
                turns[kind] = cos[computed.positions], sin[computed.positions]
            if computed.rows_before is not None:
                hidden = hidden.to(computed.positions.device).index_select(1, computed.rows_before)
            with small_operations_on_one_thread(hidden):
                hidden = self.model.layer(layer, hidden, *turns[kind], attend)
        return hidden[:, : layers[-1].computed.n_tokens]

    def _attend(
        self, layers: list[LayerPlan], layer: int, query: Tensor, key: Tensor, value: Tensor,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        """(1, H, R', D), the attention of a layer. query: (1, H, R', D); key, value: (1, G, R', D).

        layers: the plans of all layers. An observer may replace the plans of later layers.
        """
        plan = layers[layer]
        n_entries, n_computed = plan.n_entries, plan.computed.n_tokens
        computed = key[0].transpose(0, 1), value[0].transpose(0, 1)
        keys, values = entries = self._all_entries(layer, plan, computed)
        mask = plan.mask(self.model.windows[layer])
        shown = None if mask is None else mask[:n_computed, :n_entries]
        queries = query[:, :, :n_computed]
        for observe in self.observers:
            observed = ObservedLayer(
                number=layer, plan=plan, queries=queries,
                computed=(computed[0][:n_computed], computed[1][:n_computed]),
                keys=keys[:n_entries], scaling=scaling, mask=shown,
            )  # fmt: skip
            if (later := on_all_threads(partial(observe, observed))) is not None:
                layers[layer + 1 :] = later.layers[layer + 1 :]
        if self.method.attend is not None:
            as_rows = (as_heads(keys[:n_entries]), as_heads(values[:n_entries]))
            attend = self.method.attend
            output = on_all_threads(
                partial(attend, queries, *as_rows, scaling, shown, plan.is_context)
            )
            output = F.pad(output, (0, 0, 0, query.shape[2] - n_computed))
        else:
            as_rows = (as_heads(keys[: plan.n_padded]), as_heads(values[: plan.n_padded]))
            causal = mask is None and n_entries > 1
            may_round = len(plan.stored.tokens) > 0 and not self.is_exact
            output = self.model.attention(
                layer, query, *as_rows, scaling, mask, causal, may_round=may_round
            )
        if self.prefix_to_fill is not None:
            self.prefix_to_fill.take(keys, values)
        if self.cache is not None:
            self.cache.take(layer, self._staying_entries(layer, plan, entries, queries[0], scaling))
            self.cached.release(layer)
        return output

    def _all_entries(
        self, layer: int, plan: LayerPlan, of_computed: tuple[Tensor, Tensor]
    ) -> Tensor:
        """(2, S + room, G, D): the keys and values of all entries, in prompt order.

        of_computed: keys and values (R', G, D) of the computed tokens.
        """
        stored, written = plan.stored, plan.written
        keys, values = both = rooms_for(plan.n_entries, of_computed[0], plan.n_padded)
        if self.held is not None:
            of_held = self.held.of_layer(layer, plan.n_held)
            keys[: plan.n_held], values[: plan.n_held] = of_held
        self.cached.write(layer, stored.tokens, keys[stored.slots], values[stored.slots])
        for side, computed in zip(both, of_computed, strict=True):
            if written.slots is None:  # all entries are computed, in prompt order
                side[: len(computed)] = computed
                continue
            used = computed[: plan.computed.n_tokens]
            if written.rows is not None:
                used = computed.index_select(0, written.rows)
            side.index_copy_(0, written.slots, used)
            if self.method.update is not None and len(written.updated_rows):
                slots = written.updated_slots
                side[slots] = self.method.update(side[slots], computed[written.updated_rows])
        return both

    def _staying_entries(
        self, layer: int, plan: LayerPlan, entries: Tensor, queries: Tensor, scaling: float
    ) -> LayerEntries:
        """The entries of a layer for the answer's later tokens.

        entries: (2, S + room, G, D). queries: (H, R, D).
        """
        staying, n_entries, window = plan.staying, plan.n_entries, self.model.windows[layer]
        is_context, positions = plan.is_context, plan.entry_positions
        if staying.slots is not None:
            n_entries = len(staying.slots)
            kept = rooms_for(n_entries, entries[0])
            for side, all_entries in zip(kept, entries, strict=True):
                side[:n_entries] = all_entries.index_select(0, staying.slots)
            entries = kept
            is_context, positions = is_context[staying.slots], positions[staying.slots.cpu()]
        keys, values = entries
        return LayerEntries(
            keys=keys, values=values, n_entries=n_entries, is_context=is_context,
            context=staying.context,
            queries=queries if staying.query_rows is None else queries[:, staying.query_rows],
            query_slots=staying.query_slots, scaling=scaling, window=window,
            positions=None if window is None else positions,
        )  # fmt: skip

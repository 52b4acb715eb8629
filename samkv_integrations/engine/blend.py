"""One pass through the layers, over computed and cached tokens.

`plan_pass` says for each layer which tokens are computed and which stored entries are used; `Blend`
runs the plan through the model's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from samkv_integrations.engine.loader import Context
from samkv_integrations.engine.prefix_cache import Prefix
from samkv_integrations.engine.working_cache import LayerEntries, WorkingCache, as_heads, room_for
from samkv_integrations.methods.base import (
    Checked,
    ContextAttention,
    ProbedLayer,
    Update,
    overwrite,
)
from samkv_integrations.model.families import Rotation
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a pass. Places count the S entries that the layer attends to, in prompt order.

    Tensors are on the layer's device unless stated otherwise.

    positions: (R,) of the tokens that the layer computes. narrow: (R,) their indices among those
        of the layer before; None if they are the same tokens.
    n_held: first tokens of the prompt whose entries come from the prefix cache.
    cached: (n,) context tokens whose stored entries are used.
    source: (S,) the origin of each entry, as an index into held, cached and computed ones in a row.
    mixed: (k,) computed tokens that update a stored entry; mixed_slots: (k,) their places.
    carried: (c,) computed context tokens, CPU; carried_rows: (c,) their indices among the computed.
    masks: window of a layer, None for all tokens -> (R, S): 0 where a token sees an entry, else
        -inf, in the model's dtype; bool for a method with its own attention. Empty if every token
        is computed and sees all tokens before it.
    at: (S,) positions of the entries.
    is_context: (S,) bool, entries of context tokens.

    The rest is about the S' entries that stay for the answer's later tokens:

    staying: (S',) places of the entries that stay, None for all.
    context: (c,) context tokens that stay; context_slots: (c,) their places among the S'; changed:
        (d,) those of them that differ from their stored entry; other_slots: places of all others.
    query_rows: computed tokens that stay; query_slots: their places among the S', CPU.
    """

    n_entries: int
    n_held: int
    positions: Tensor
    narrow: Tensor | None
    cached: Tensor
    source: Tensor
    mixed: Tensor
    mixed_slots: Tensor
    carried: Tensor
    carried_rows: Tensor
    masks: Mapping[int | None, Tensor]
    at: Tensor
    is_context: Tensor
    staying: Tensor | None
    context: Tensor
    context_slots: Tensor
    changed: Tensor
    other_slots: Tensor
    query_rows: Tensor
    query_slots: Tensor


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """The plan of a pass. Consecutive layers with the same plan share a `LayerPlan`.

    blocks: (L, Nb) bool, blocks of which a stored entry is used.
    kept: (L, Nb) bool, blocks that stay.
    computed: (L, Tctx) bool, context tokens that are computed.
    """

    layers: tuple[LayerPlan, ...]
    blocks: Tensor
    kept: Tensor
    computed: Tensor


def plan_pass(
    layout: Layout,
    keep: Tensor,
    recompute: Tensor,
    *,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    n_held: int = 0,
    mixes: bool = False,
    weighs: bool = False,
    windows: Sequence[int | None] = (),
) -> PassPlan:
    """Plan a pass.

    A token that is recomputed at a layer is computed at all layers below it (paper: section 3.3,
    rules 1 and 2). Below, its stored entry stays and the token only attends. Where its block is not
    kept, its computed entry is attended to in that layer and then dropped.

    keep: (L, Nb) bool. recompute: (L, Tctx) bool, ignored where the block is not kept.
    devices: of each layer. dtype: the model's.
    n_held: first tokens that the prefix cache holds, all of them uncached; the other uncached
        tokens are computed.
    mixes: whether a recomputed entry needs the stored one. weighs: whether the method has its own
        attention, which always takes a mask.
    windows: those of the layers that are shorter than the prompt.
    """
    uncached = layout.uncached
    stored = keep[:, layout.block_of_token] & ~uncached[layout.context_positions]
    recompute = recompute & stored
    carried = recompute.flip(0).cummax(0).values.flip(0)
    used = stored if mixes else stored & ~recompute
    masks = torch.stack((stored, recompute, carried))
    differing = (masks[:, 1:] != masks[:, :-1]).flatten(2).any(2).any(0).tolist()
    moving = [here != before for before, here in pairwise(devices)]
    is_new = [True, *(any(both) for both in zip(differing, moving, strict=True))]
    assert bool(uncached[:n_held].all())
    at = layout.context_positions

    def in_prompt(of_context: Tensor) -> Tensor:
        """(Tctx,) mask -> (T,)."""
        mask = torch.zeros_like(uncached)
        mask[at] = of_context
        return mask

    layers: list[LayerPlan] = []
    before: Tensor | None = None  # (T,) mask of what the layer before computes
    for layer, differs in enumerate(is_new):
        if not differs:
            same = layers[-1]
            layers.append(same if same.narrow is None else replace(same, narrow=None))
            continue
        device = devices[layer]
        is_stored, is_again = in_prompt(stored[layer]), in_prompt(recompute[layer])
        is_computed = uncached | in_prompt(carried[layer])
        stays, present = uncached | is_stored, is_computed | is_stored
        is_computed[:n_held] = False
        slot, final = present.cumsum(0) - 1, stays.cumsum(0) - 1
        positions, entries = is_computed.nonzero()[:, 0], present.nonzero()[:, 0]
        cached, context = used[layer].nonzero()[:, 0], stored[layer].nonzero()[:, 0]
        source = torch.arange(len(entries))  # correct for the held ones
        brings = (~is_stored[positions] | (is_again[positions] & (not mixes))).nonzero()[:, 0]
        source[slot[positions[brings]]] = n_held + len(cached) + brings
        source[slot[at[cached]]] = n_held + torch.arange(len(cached))
        mixed = (is_again[positions] & mixes).nonzero()[:, 0]
        query_rows = stays[positions].nonzero()[:, 0]
        narrows = before is not None and not torch.equal(before, is_computed)
        seen_of: dict[int | None, Tensor] = {}
        wanted = set(windows) - {None}
        if weighs or len(positions) < len(entries):
            wanted.add(None)
        if wanted:
            behind = positions.to(device)[:, None] - entries.to(device)[None]
        for window in wanted:
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            # made once: attention would convert a bool mask at every layer
            seen_of[window] = seen if weighs else torch.where(seen, 0.0, -torch.inf).to(dtype)
        plan = LayerPlan(
            n_entries=len(entries), n_held=n_held, positions=positions.to(device),
            narrow=is_computed[before].nonzero()[:, 0].to(device) if narrows else None,
            cached=cached.to(device), source=source.to(device), mixed=mixed.to(device),
            mixed_slots=slot[positions[mixed]].to(device),
            carried=carried[layer].nonzero()[:, 0],
            carried_rows=torch.searchsorted(positions, at[carried[layer]]).to(device),
            masks=seen_of, at=entries, is_context=~uncached[entries].to(device),
            staying=None if torch.equal(stays, present) else slot[stays].to(device),
            context=context.to(device), context_slots=final[at[context]].to(device),
            changed=recompute[layer][context].nonzero()[:, 0].to(device),
            other_slots=final[stays & ~is_stored].to(device), query_rows=query_rows.to(device),
            query_slots=final[positions[query_rows]],
        )  # fmt: skip
        layers.append(plan)
        before = is_computed
    blocks = torch.zeros_like(keep).index_add_(1, layout.block_of_token, used)
    return PassPlan(layers=tuple(layers), blocks=blocks, kept=keep, computed=carried)


# -- the pass ---------------------------------------------------------------------------------

Observe = Callable[[ProbedLayer], None]
"""Looks at a layer of a probe."""

Decide = Callable[[Checked], PassPlan]
"""Decides at the check layer what all later layers do."""

Watch = Callable[[int, LayerPlan, Tensor, Tensor, float, Tensor | None], None]
"""Sees each layer: its number and plan, queries (1, H, R, D), keys (S, G, D), scaling and mask."""


@dataclass(frozen=True, kw_only=True)
class Blend:
    """A pass of one request: `run` it, or go `through_layers` where no logits are needed.

    rotation: of all T positions.
    update: combines a recomputed entry with the stored one. weigh: the method's own attention, None
    for the model's.
    held: entries of the prompt's first tokens, from the prefix cache. leaves: takes those that
    later prompts may reuse.
    cache: takes the entries that a layer leaves. observe: looks at each layer instead.
    check: a layer, and the function that decides there what all later layers do. watch: sees each
    layer.
    """

    model: Model
    layout: Layout
    context: Context
    rotation: Rotation
    update: Update = overwrite
    weigh: ContextAttention | None = None
    held: Prefix | None = None
    leaves: Prefix | None = None
    cache: WorkingCache | None = None
    observe: Observe | None = None
    check: tuple[int, Decide] | None = None
    watch: Watch | None = None

    def run(self, plan: PassPlan) -> Tensor:
        """Logits (vocabulary,) of the last token. The plan's blocks must have been loaded."""
        n_tokens = len(plan.layers[0].positions)
        # what later prompts take from memory is exact
        with self.model.short_pass(n_tokens) if self.leaves is None else nullcontext():
            return self.model.logits(self.through_layers(plan)[0, -1:])[0]

    def through_layers(self, plan: PassPlan) -> Tensor:
        """(1, R, hidden size): output of the last layer for the tokens that it computes."""
        layers = list(plan.layers)
        attend = partial(self._attend, layers)
        positions = layers[0].positions
        hidden = self.model.embed(self.layout.token_ids.to(positions.device)[positions])[None]
        for layer in range(self.model.n_layers):
            at, narrow = layers[layer].positions, layers[layer].narrow
            hidden = hidden.to(at.device)
            if narrow is not None:
                hidden = hidden.index_select(1, narrow)
            cos, sin = (side[at] for side in self.rotation.of(layer))
            hidden = self.model.layer(layer, hidden, cos, sin, attend)
        return hidden

    def _attend(
        self, layers: list[LayerPlan], layer: int, query: Tensor, key: Tensor, value: Tensor,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        """The attention of a layer: (1, H, R, D) each but key and value (1, G, R, D).

        layers: the plans of all layers. At the check layer those of the later ones are replaced.
        """
        plan = layers[layer]
        if self.check is not None and layer == self.check[0]:
            carried, rows = plan.carried, plan.carried_rows
            checked = Checked(
                tokens=carried, queries=query[0][:, -len(self.layout.question) :],
                keys=key[0].transpose(0, 1)[rows], values=value[0].transpose(0, 1)[rows],
                cached=lambda: self.context.keys_and_values(layer, carried.to(key.device)),
                scaling=scaling,
            )  # fmt: skip
            layers[layer + 1 :] = self.check[1](checked).layers[layer + 1 :]
        stored = self.context.keys_and_values(layer, plan.cached)
        computed = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        held = () if self.held is None else self.held.of_layer(layer, plan.n_held)
        of_keys, of_values = zip(*filter(None, (held, stored, computed)), strict=True)
        keys, values = self._assemble(plan, of_keys), self._assemble(plan, of_values)
        window = self.model.windows[layer]
        # a window that holds the whole prompt has no mask of its own
        mask = plan.masks.get(window if window in plan.masks else None)
        if self.observe is not None:
            at = plan.positions
            cos, sin = (side[at] for side in self.rotation.of(layer))
            self.observe(ProbedLayer(queries=query[0], cos=cos, sin=sin))
        if self.watch is not None:
            self.watch(layer, plan, query, keys[: plan.n_entries], scaling, mask)
        as_rows = (as_heads(keys[: plan.n_entries]), as_heads(values[: plan.n_entries]))
        if self.weigh is not None:
            output = self.weigh(query, *as_rows, scaling, mask, plan.is_context)
        else:
            causal = mask is None and plan.n_entries > 1
            # what later prompts take from memory is exact
            may_round = len(plan.cached) > 0 and self.leaves is None
            output = self.model.attention(
                layer, query, *as_rows, scaling, mask, causal, may_round=may_round
            )
        if self.leaves is not None:
            self.leaves.take(keys, values)
        if self.cache is not None:
            n_entries, is_context, at = plan.n_entries, plan.is_context, plan.at
            if plan.staying is not None:
                n_entries = len(plan.staying)
                staying_keys = room_for(n_entries, keys)
                staying_values = room_for(n_entries, values)
                staying_keys[:n_entries] = keys.index_select(0, plan.staying)
                staying_values[:n_entries] = values.index_select(0, plan.staying)
                keys, values = staying_keys, staying_values
                is_context, at = is_context[plan.staying], at[plan.staying.cpu()]
            entries = LayerEntries(
                keys=keys, values=values, n_entries=n_entries, is_context=is_context,
                context=plan.context, context_slots=plan.context_slots, changed=plan.changed,
                other_slots=plan.other_slots, queries=query[0][:, plan.query_rows],
                query_slots=plan.query_slots, scaling=scaling,
                at=None if window is None else at, window=window,
            )  # fmt: skip
            self.cache.take(layer, entries)
            self.context.release(layer)
        return output

    def _assemble(self, plan: LayerPlan, sides: tuple[Tensor, ...]) -> Tensor:
        """(S + room, G, D): the keys or values of all entries, in prompt order.

        sides: (n, G, D) each, held, stored and computed ones; the computed ones last.
        """
        computed = sides[-1]
        entries = room_for(plan.n_entries, computed)
        if len(plan.cached) or plan.n_held:
            entries[: plan.n_entries] = torch.cat(sides).index_select(0, plan.source)
        else:  # all are computed, in prompt order
            entries[: plan.n_entries] = computed
        if len(plan.mixed):
            entries[plan.mixed_slots] = self.update(entries[plan.mixed_slots], computed[plan.mixed])
        return entries

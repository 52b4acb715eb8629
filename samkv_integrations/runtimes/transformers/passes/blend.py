"""One pass through the layers, over computed and cached tokens.

`plan_pass` says for each layer which tokens are computed and which stored entries are used; `Blend`
runs the plan through the model's own layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.attention import of_groups
from samkv_integrations.runtimes.transformers.model.families import Rotation
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.papers.base import ContextAttention, Update
from samkv_integrations.runtimes.transformers.passes.loader import Context
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    CopiedEntries,
    LayerEntries,
    LayerwiseEntries,
    WorkingCache,
    as_heads,
    rooms_for,
)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a pass. Places count the S entries that the layer attends to, in prompt order.

    Tensors are on the layer's device unless stated otherwise.

    n_entries: S; n_padded: with entries of zeros behind them, which nothing attends to, so that a
        CPU has few shapes to compile for.
    n_computed: R, tokens that the layer computes. positions: (R',) theirs; the last one may be
        repeated, see `Model.n_more_rows`. narrow: (R',) their indices among those of the layer
        before; None if they are the same tokens.
    n_held: first tokens of the prompt whose entries come from a kept sequence.
    decoded: places from the first to the last stored entry that is used; tokens: (n,) the context
        token of each of them, any one at the place of another entry, which is written later.
    brought: (b,) computed tokens that bring their entry, None for all of them; slots: (b,) their
        places, None for the first R'.
    mixed: (k,) computed tokens that update a stored entry; mixed_slots: (k,) their places.
    carried: (c,) computed context tokens, CPU; carried_rows: (c,) their indices among the computed.
    masks: window of a layer, None for all tokens -> (R', n_padded): 0 where a token sees an entry,
        else -inf, in the model's dtype, see `of_groups`; bool for a method with its own attention.
        Empty if every token is computed and sees all tokens before it.
    at: (S,) positions of the entries.
    is_context: (S,) bool, entries of context tokens.

    The rest is about the S' entries that stay for the answer's later tokens:

    staying: (S',) places of the entries that stay, None for all.
    context: (c,) context tokens that stay; context_slots: (c,) their places among the S'; changed:
        (d,) those of them that differ from their stored entry; other_slots: places of all others.
    query_rows: computed tokens that stay, None for all; query_slots: their places among the S',
        CPU.
    """

    n_entries: int
    n_padded: int
    n_computed: int
    n_held: int
    positions: Tensor
    narrow: Tensor | None
    decoded: slice
    tokens: Tensor
    brought: Tensor | None
    slots: Tensor | None
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
    query_rows: Tensor | None
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
    model: LayeredModel,
    layout: TensorLayout,
    keep: Tensor,
    recompute: Tensor,
    *,
    n_held: int = 0,
    again: Tensor | None = None,
    mixes: bool = False,
    weighs: bool = False,
) -> PassPlan:
    """Plan a pass.

    A token that is recomputed at a layer is computed at all layers below it (paper: section 3.3,
    rules 1 and 2). Below, its stored entry stays and the token only attends. Where its block is not
    kept, its computed entry is attended to in that layer and then dropped.

    keep: (L, Nb) bool. recompute: (L, Tctx) bool, ignored where the block is not kept.
    n_held: first tokens that a kept sequence has, all of them uncached; the other uncached
        tokens are computed, and those at the positions ``again``.
    mixes: whether a recomputed entry needs the stored one. weighs: whether the method has its own
        attention, which always takes a mask.
    """
    devices, windows = model.layer_devices, model.windows_within(layout.n_tokens)
    uncached = layout.uncached
    stored = keep[:, layout.block_of_token] & ~uncached[layout.context_positions]
    recompute = recompute & stored
    carried = recompute.flip(0).cummax(0).values.flip(0)
    used = stored if mixes else stored & ~recompute
    roles = torch.stack((stored, recompute, carried))
    differing = (roles[:, 1:] != roles[:, :-1]).flatten(2).any(2).any(0).tolist()
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
        if again is not None:
            is_computed[again] = True
        slot, final = present.cumsum(0) - 1, stays.cumsum(0) - 1
        positions, entries = is_computed.nonzero()[:, 0], present.nonzero()[:, 0]
        n_computed, n_entries = len(positions), len(entries)
        cached, context = used[layer].nonzero()[:, 0], stored[layer].nonzero()[:, 0]
        places, decoded = slot[at[cached]], slice(0, 0)
        if len(cached):
            decoded = slice(int(places[0]), int(places[-1]) + 1)
        tokens = torch.zeros(decoded.stop - decoded.start, dtype=torch.long)
        tokens[places - decoded.start] = cached
        brings = (~is_stored[positions] | (is_again[positions] & (not mixes))).nonzero()[:, 0]
        mixed = (is_again[positions] & mixes).nonzero()[:, 0]
        query_rows = stays[positions].nonzero()[:, 0]
        narrow = None
        if before is not None and not torch.equal(before, is_computed):
            narrow = is_computed[before].nonzero()[:, 0]
        slots, mixed_slots = slot[positions[brings]], slot[positions[mixed]]
        query_slots = final[positions[query_rows]]
        carried_rows = torch.searchsorted(positions, at[carried[layer]])
        n_more = model.n_more_rows(n_computed)
        is_causal = n_computed == n_entries
        n_padded = n_entries + (n_more if is_causal else model.n_more_keys(n_entries))
        positions = torch.cat((positions, positions[-1:].expand(n_more)))
        if narrow is not None:
            narrow = torch.cat((narrow, narrow[-1:].expand(n_more)))
        masks: dict[int | None, Tensor] = {}
        wanted = set(windows) - {None}
        if weighs or not is_causal:
            wanted.add(None)
        if wanted:  # what is behind all tokens is seen by none
            seen_at = F.pad(entries, (0, n_padded - n_entries), value=layout.n_tokens)
            behind = positions.to(device)[:, None] - seen_at.to(device)[None]
        for window in wanted:
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            if not weighs:  # made once: attention would do it at every layer
                added = torch.where(seen, 0.0, -torch.inf).to(model.dtype)
                seen = of_groups(added, model.n_heads, model.n_kv_heads, model.head_dim)
            masks[window] = seen
        plan = LayerPlan(
            n_entries=n_entries, n_padded=n_padded, n_computed=n_computed, n_held=n_held,
            positions=positions.to(device), narrow=None if narrow is None else narrow.to(device),
            decoded=decoded, tokens=tokens.to(device),
            brought=None if len(brings) == n_computed else brings.to(device),
            slots=slots.to(device) if len(cached) or n_held else None, mixed=mixed.to(device),
            mixed_slots=mixed_slots.to(device), carried=carried[layer].nonzero()[:, 0],
            carried_rows=carried_rows.to(device), masks=masks, at=entries,
            is_context=~uncached[entries].to(device),
            staying=None if torch.equal(stays, present) else slot[stays].to(device),
            context=context.to(device), context_slots=final[at[context]].to(device),
            changed=recompute[layer][context].nonzero()[:, 0].to(device),
            other_slots=final[stays & ~is_stored].to(device),
            query_rows=None if len(query_rows) == n_computed else query_rows.to(device),
            query_slots=query_slots,
        )  # fmt: skip
        layers.append(plan)
        before = is_computed
    blocks = torch.zeros_like(keep).index_add_(1, layout.block_of_token, used)
    return PassPlan(layers=tuple(layers), blocks=blocks, kept=keep, computed=carried)


# -- the pass ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ObservedLayer:
    """What a pass has computed at a layer, all rotated, before the layer's attention.

    number: of the layer, from 0. plan: what the layer does.
    queries: (1, H, R, D) of the computed tokens; computed: their keys and values, (R, G, D) each.
    keys: (S, G, D) of all entries that the layer attends to.
    scaling, mask: of its attention; mask (R, S), see `LayerPlan.masks`, None without one.
    """

    number: int
    plan: LayerPlan
    queries: Tensor
    computed: tuple[Tensor, Tensor]
    keys: Tensor
    scaling: float
    mask: Tensor | None


class Observer(Protocol):
    """Sees each layer of a pass, and may change what later layers do."""

    def __call__(self, layer: ObservedLayer) -> PassPlan | None:
        """A plan to follow from the next layer on; None to go on as planned."""
        ...


@dataclass(frozen=True, kw_only=True)
class Blend:
    """A pass of one request: `run` it, or go `through_layers` where no logits are needed.

    rotation: of all T positions.
    update: combines a recomputed entry with the stored one; None to replace it. weigh: the method's
    own attention, None for the model's.
    held: entries of the prompt's first tokens, from a kept sequence. prefix_to_fill: gets copies of
    those that later prompts may take, where the cache will not have them.
    is_exact: whether later prompts take entries that this pass computes for full prefill's: nothing
    is rounded for speed then.
    cache: takes the entries that a layer leaves; None in a probe. observers: see each layer.
    """

    model: LayeredModel
    context: Context
    rotation: Rotation
    update: Update | None = None
    weigh: ContextAttention | None = None
    held: LayerwiseEntries | None = None
    prefix_to_fill: CopiedEntries | None = None
    is_exact: bool = False
    cache: WorkingCache | None = None
    observers: tuple[Observer, ...] = ()

    def run(self, plan: PassPlan) -> Tensor:
        """Logits (vocabulary,) of the last token. The plan's blocks must have been loaded."""
        n_tokens = plan.layers[0].n_computed
        with nullcontext() if self.is_exact else self.model.short_pass(n_tokens):
            last = self.through_layers(plan)[0, -1:]
        with self.model.short_pass(1):
            return self.model.logits(last)[0]

    def through_layers(self, plan: PassPlan) -> Tensor:
        """(1, R, hidden size): output of the last layer for the tokens that it computes."""
        layers = list(plan.layers)
        attend = partial(self._attend, layers)
        positions = layers[0].positions
        token_ids = self.context.layout.token_ids.to(positions.device)[positions]
        hidden = self.model.embed(token_ids)[None]
        turns: dict[int, tuple[Tensor, Tensor]] = {}  # by rotation, of the layers with one plan
        for layer in range(self.model.n_layers):
            plan_here, kind = layers[layer], self.rotation.kinds[layer]
            if layer == 0 or plan_here.positions is not layers[layer - 1].positions:
                turns = {}
            if kind not in turns:
                cos, sin = self.rotation.of(layer)
                turns[kind] = cos[plan_here.positions], sin[plan_here.positions]
            if plan_here.narrow is not None:
                hidden = hidden.to(plan_here.positions.device).index_select(1, plan_here.narrow)
            hidden = self.model.layer(layer, hidden, *turns[kind], attend)
        return hidden[:, : layers[-1].n_computed]

    def _attend(
        self, layers: list[LayerPlan], layer: int, query: Tensor, key: Tensor, value: Tensor,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        """The attention of a layer: (1, H, R', D) each but key and value (1, G, R', D).

        layers: the plans of all layers. An observer may replace those of the later ones.
        """
        plan = layers[layer]
        n_entries, n_padded = plan.n_entries, plan.n_padded
        queries = query[:, :, : plan.n_computed]
        of_computed = key[0].transpose(0, 1), value[0].transpose(0, 1)

        # the keys and values of all entries (S + room, G, D), in prompt order
        keys, values = both = rooms_for(n_entries, of_computed[0], n_padded)
        if self.held is not None:
            of_held = self.held.of_layer(layer, plan.n_held)
            keys[: plan.n_held], values[: plan.n_held] = of_held
        self.context.write(layer, plan.tokens, keys[plan.decoded], values[plan.decoded])
        for side, computed in zip(both, of_computed, strict=True):
            if plan.slots is None:  # all are computed, in prompt order
                side[: len(computed)] = computed
                continue
            brought = computed[: plan.n_computed]
            if plan.brought is not None:
                brought = computed.index_select(0, plan.brought)
            side.index_copy_(0, plan.slots, brought)
            if self.update is not None and len(plan.mixed):
                mixed = self.update(side[plan.mixed_slots], computed[plan.mixed])
                side[plan.mixed_slots] = mixed

        window = self.model.windows[layer]
        # a window that holds the whole prompt has no mask of its own
        mask = plan.masks.get(window if window in plan.masks else None)
        shown = None if mask is None else mask[: plan.n_computed, :n_entries]
        for observe in self.observers:
            key_rows, value_rows = (side[: plan.n_computed] for side in of_computed)
            observed = ObservedLayer(
                number=layer, plan=plan, queries=queries, computed=(key_rows, value_rows),
                keys=keys[:n_entries], scaling=scaling, mask=shown,
            )  # fmt: skip
            if (later := observe(observed)) is not None:
                layers[layer + 1 :] = later.layers[layer + 1 :]
        if self.weigh is not None:
            as_rows = (as_heads(keys[:n_entries]), as_heads(values[:n_entries]))
            output = self.weigh(queries, *as_rows, scaling, shown, plan.is_context)
            output = F.pad(output, (0, 0, 0, query.shape[2] - plan.n_computed))
        else:
            as_rows = (as_heads(keys[:n_padded]), as_heads(values[:n_padded]))
            causal = mask is None and n_entries > 1
            may_round = len(plan.tokens) > 0 and not self.is_exact
            output = self.model.attention(
                layer, query, *as_rows, scaling, mask, causal, may_round=may_round
            )
        if self.prefix_to_fill is not None:
            self.prefix_to_fill.take(keys, values)
        if self.cache is not None:
            is_context, at = plan.is_context, plan.at
            if plan.staying is not None:
                n_entries = len(plan.staying)
                staying = rooms_for(n_entries, keys)
                for side, all_entries in zip(staying, both, strict=True):
                    side[:n_entries] = all_entries.index_select(0, plan.staying)
                keys, values = staying
                is_context, at = is_context[plan.staying], at[plan.staying.cpu()]
            entries = LayerEntries(
                keys=keys, values=values, n_entries=n_entries, is_context=is_context,
                context=plan.context, context_slots=plan.context_slots, changed=plan.changed,
                other_slots=plan.other_slots,
                queries=queries[0] if plan.query_rows is None else queries[0][:, plan.query_rows],
                query_slots=plan.query_slots, scaling=scaling,
                at=None if window is None else at, window=window,
            )  # fmt: skip
            self.cache.take(layer, entries)
            self.context.release(layer)
        return output

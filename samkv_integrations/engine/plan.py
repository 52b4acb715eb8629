"""What a pass computes and what it takes from caches, layer by layer, decided before it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.prompt.layout import Layout


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a pass. Places are those of the S entries that the layer attends to.

    Entries are in prompt order; tensors are on the model's device unless said otherwise.

    positions: (R,) of the tokens that the layer computes. narrow: (R,) where they are among those
        of the layer before, None if they are the same.
    n_held: the first tokens of the prompt, whose entries are held in memory.
    cached: (n,) context tokens whose stored entries are used.
    source: (S,) where each entry comes from: the held ones, those n, then the computed tokens, as
        counted through.
    mixed: (k,) which computed tokens update a stored entry, mixed_slots: (k,) their places.
    carried: (c,) computed context tokens, on the CPU, carried_rows: (c,) which computed tokens
        they are.
    mask: (R, S), 0 where a token sees an entry, else -inf, in the model's dtype; bool for a method
        that weighs the context in its own way; None if every token is computed and sees those
        before it.
    is_context: (S,) bool, entries of context tokens.

    The rest says what an answer goes on with, counted among the S' of the entries that stay:

    staying: (S',) places of the entries that stay, None for all.
    context: (c,) context tokens that stay, context_slots: (c,) their places; changed: (d,) which of
        them do not stay as they are stored; other_slots: the places of all other tokens.
    query_rows: computed tokens that stay, and query_slots: their places, on the CPU.
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
    mask: Tensor | None
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
    """A pass. Neighbouring layers that do the same share a `LayerPlan`.

    blocks: (L, Nb) bool, blocks of which a stored entry is used.
    kept: (L, Nb) bool, blocks that stay.
    computed: (L, Tctx) bool, context tokens that take part in the computation.
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
    device: torch.device,
    dtype: torch.dtype,
    uncached: Tensor | None = None,
    n_held: int = 0,
    mixes: bool = False,
    weighs: bool = False,
) -> PassPlan:
    """The plan of a pass.

    A token that a layer needs is carried through all layers below it (paper: section 3.3, rules 1
    and 2). Where it is not itself recomputed, the stored entry stays and the token only attends;
    where its block is not kept, it takes part with what it computes, and does not stay.

    keep: (L, Nb) bool. recompute: (L, Tctx) bool, ignored where the block is not kept.
    device, dtype: the model's.
    uncached: (T,) bool, other tokens that take part, all uncached ones if None. They are computed,
        but for the first ``n_held`` tokens of the prompt, which are among them and held in memory.
    mixes: whether a recomputed entry needs the stored one. weighs: whether the method weighs the
        context in its own way, so that a mask is always wanted.
    """
    uncached = layout.uncached if uncached is None else uncached
    held = keep[:, layout.block_of_token] & ~layout.uncached[layout.context_positions]
    recompute = recompute & held
    carried = recompute.flip(0).cummax(0).values.flip(0)
    used = held if mixes else held & ~recompute
    masks = torch.stack((held, recompute, carried))
    is_new = [True, *(masks[:, 1:] != masks[:, :-1]).flatten(2).any(2).any(0).tolist()]
    layers: list[LayerPlan] = []
    before: Tensor | None = None
    assert bool(uncached[:n_held].all())
    planner = _Planner(
        layout, uncached, n_held, mixes=mixes, weighs=weighs, device=device, dtype=dtype
    )
    for layer, differs in enumerate(is_new):
        if differs:
            plan, before = planner.plan(held[layer], recompute[layer], carried[layer], before)
        elif layers[-1].narrow is not None:
            plan = replace(layers[-1], narrow=None)
        layers.append(plan)
    blocks = torch.zeros_like(keep).index_add_(1, layout.block_of_token, used)
    return PassPlan(layers=tuple(layers), blocks=blocks, kept=keep, computed=carried)


@dataclass(frozen=True)
class _Planner:
    layout: Layout
    uncached: Tensor
    n_held: int
    mixes: bool
    weighs: bool
    device: torch.device
    dtype: torch.dtype

    def plan(
        self, held: Tensor, recompute: Tensor, carried: Tensor, before: Tensor | None
    ) -> tuple[LayerPlan, Tensor]:
        """The plan of a layer from (Tctx,) masks, and the (T,) mask of what it computes.

        before: that mask of the layer before.
        """
        device, at, n_held = self.device, self.layout.context_positions, self.n_held
        is_held, is_again = self._in_prompt(held), self._in_prompt(recompute)
        is_computed = self.uncached | self._in_prompt(carried)
        stays, present = self.uncached | is_held, is_computed | is_held
        is_computed[:n_held] = False
        slot, final = present.cumsum(0) - 1, stays.cumsum(0) - 1
        positions, entries = is_computed.nonzero()[:, 0], present.nonzero()[:, 0]
        cached = (held if self.mixes else held & ~recompute).nonzero()[:, 0]
        source = torch.arange(len(entries))  # right for those held in memory
        brings = (~is_held[positions] | (is_again[positions] & (not self.mixes))).nonzero()[:, 0]
        source[slot[positions[brings]]] = n_held + len(cached) + brings
        source[slot[at[cached]]] = n_held + torch.arange(len(cached))
        mixed = (is_again[positions] & self.mixes).nonzero()[:, 0]
        context = held.nonzero()[:, 0]
        query_rows = stays[positions].nonzero()[:, 0]
        narrows = before is not None and not torch.equal(before, is_computed)
        plan = LayerPlan(
            n_entries=len(entries),
            n_held=n_held,
            positions=positions.to(device),
            narrow=is_computed[before].nonzero()[:, 0].to(device) if narrows else None,
            cached=cached.to(device),
            source=source.to(device),
            mixed=mixed.to(device),
            mixed_slots=slot[positions[mixed]].to(device),
            carried=carried.nonzero()[:, 0],
            carried_rows=torch.searchsorted(positions, at[carried]).to(device),
            mask=self._mask(entries, positions),
            is_context=~self.layout.uncached[entries].to(device),
            staying=None if torch.equal(stays, present) else slot[stays].to(device),
            context=context.to(device),
            context_slots=final[at[context]].to(device),
            changed=recompute[context].nonzero()[:, 0].to(device),
            other_slots=final[stays & ~is_held].to(device),
            query_rows=query_rows.to(device),
            query_slots=final[positions[query_rows]],
        )
        return plan, is_computed

    def _in_prompt(self, of_context: Tensor) -> Tensor:
        """(Tctx,) mask -> (T,)."""
        mask = torch.zeros_like(self.uncached)
        mask[self.layout.context_positions] = of_context
        return mask

    def _mask(self, entries: Tensor, positions: Tensor) -> Tensor | None:
        """See `LayerPlan`."""
        if len(positions) == len(entries) and not self.weighs:
            return None
        mask = entries.to(self.device)[None] <= positions.to(self.device)[:, None]
        # attention would turn a bool mask into this one at every layer
        return mask if self.weighs else torch.where(mask, 0.0, -torch.inf).to(self.dtype)

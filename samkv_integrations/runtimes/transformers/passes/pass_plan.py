"""The plan of a prompt pass: what each layer does, decided before the pass runs.

`plan_pass` makes the plan, which `blend.Blend` follows.

A plan has four kinds of indices. A position is the index of one of the T tokens of the prompt. A
context token is one of the Tctx tokens of chunks. A slot is the index of one of the S entries that
a layer attends to, in prompt order. A row is the index of one of the R tokens that a layer
computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.attention import of_groups
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.passes.working_cache import ContextSlots

# -- the plan. Tensors are on the layer's device unless stated otherwise. --------------------------


@dataclass(frozen=True, kw_only=True)
class ComputedTokens:
    """The tokens that a layer computes, in prompt order.

    n_tokens: R. positions: (R',) positions of these tokens; the last one may be repeated, see
        `Model.n_more_rows`.
    rows_before: (R',) rows of these tokens at the layer before; None if that layer computes the
        same tokens.
    context: (c,) CPU, the context tokens with a cache among them; context_rows: (c,) their rows.
    """

    n_tokens: int
    positions: Tensor
    rows_before: Tensor | None
    context: Tensor
    context_rows: Tensor


@dataclass(frozen=True, kw_only=True)
class StoredEntries:
    """The stored entries that a layer uses.

    slots: the range from the first to the last of these entries. tokens: (n,) the context token
        of each slot in this range; any token for a slot of another entry, which is written later.
    """

    slots: slice
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class WrittenEntries:
    """The slots of the entries that a layer computes.

    rows: (b,) rows whose computed entry is used, None for all R. slots: (b,) slots of these
        entries, None for the first R'.
    updated_rows: (k,) rows whose stored entry is combined with the computed one; updated_slots:
        (k,) slots of these entries.
    """

    rows: Tensor | None
    slots: Tensor | None
    updated_rows: Tensor
    updated_slots: Tensor


@dataclass(frozen=True, kw_only=True)
class StayingEntries:
    """The S' entries that stay for the answer's later tokens.

    slots: (S',) their slots among the S entries, None for all. context: which of the S' entries are
        of context tokens.
    query_rows: rows of the computed tokens that stay, None for all; query_slots: CPU, the slots of
        these tokens among the S' entries.
    """

    slots: Tensor | None
    context: ContextSlots
    query_rows: Tensor | None
    query_slots: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a pass.

    n_entries: S. n_padded: S and the entries of zeros behind them, which no token attends to; they
        leave a CPU few shapes to compile for.
    n_held: tokens of the cached prefix, whose entries come from a kept sequence.
    entry_positions: (S,) CPU, positions of the entries. is_context: (S,) bool, the entries of
        context tokens with a cache.
    masks: window of a layer, None for all tokens -> (R', n_padded): 0 where a token sees an entry,
        else -inf, in the model's dtype, see `of_groups`; bool for a method with its own attention.
        Empty if every token is computed and sees all tokens before it.
    """

    n_entries: int
    n_padded: int
    n_held: int
    entry_positions: Tensor
    is_context: Tensor
    computed: ComputedTokens
    stored: StoredEntries
    written: WrittenEntries
    masks: Mapping[int | None, Tensor]
    staying: StayingEntries

    def mask(self, window: int | None) -> Tensor | None:
        """The mask of a layer with this window; None where causal attention needs none."""
        # a window that holds the whole prompt has no mask of its own
        return self.masks.get(window if window in self.masks else None)


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """The plan of a pass. Consecutive layers with the same plan share a `LayerPlan`.

    blocks: (L, Nb) bool, the blocks of which a stored entry is used.
    kept: (L, Nb) bool, the blocks whose entries stay for the answer.
    computed: (L, Tctx) bool, context tokens that are computed.
    """

    layers: tuple[LayerPlan, ...]
    blocks: Tensor
    kept: Tensor
    computed: Tensor


# -- making a plan ---------------------------------------------------------------------------------


def plan_pass(
    model: LayeredModel,
    layout: TensorLayout,
    keep: Tensor,
    recompute: Tensor,
    *,
    n_held: int = 0,
    again: Tensor | None = None,
    updates: bool = False,
    has_own_attention: bool = False,
) -> PassPlan:
    """Plan a pass.

    A token that is recomputed at a layer is computed at all layers below it (paper: section 3.3,
    rules 1 and 2). Below, its stored entry stays and the token only attends. Where its block is not
    kept, its computed entry is attended to in that layer and then dropped.

    keep: (L, Nb) bool. recompute: (L, Tctx) bool, ignored where the block is not kept.
    n_held: tokens of the cached prefix, none of them in a chunk with a cache. All other uncached
        tokens are computed, and so are the tokens at the positions ``again``.
    updates: whether a recomputed entry needs the stored one. has_own_attention: whether the method
        has its own attention, which always takes a mask.
    """
    assert bool(layout.uncached[:n_held].all())
    stored = keep[:, layout.block_of_token] & ~layout.uncached[layout.context_positions]
    recomputed = recompute & stored
    roles = _ContextRoles(
        stored=stored, recomputed=recomputed,
        computed=recomputed.flip(0).cummax(0).values.flip(0),
        used=stored if updates else stored & ~recomputed,
    )  # fmt: skip
    layers: list[LayerPlan] = []
    before: Tensor | None = None  # (T,) bool, the tokens that the layer before computes
    for layer, is_new in enumerate(roles.differ_from_layer_before(model.layer_devices)):
        if not is_new:
            layers.append(_repeated(layers[-1]))
            continue
        tokens = _LayerTokens(layout, roles, layer, n_held, again)
        device = model.layer_devices[layer]
        computed = _computed_tokens(model, layout, tokens, before, device)
        entry_positions = tokens.is_attended.nonzero()[:, 0]
        n_entries, n_computed = len(entry_positions), computed.n_tokens
        is_causal = n_computed == n_entries  # every token sees all before it
        n_more = model.n_more_rows(n_computed) if is_causal else model.n_more_keys(n_entries)
        plan = LayerPlan(
            n_entries=n_entries, n_padded=n_entries + n_more, n_held=n_held,
            entry_positions=entry_positions,
            is_context=~layout.uncached[entry_positions].to(device),
            computed=computed,
            stored=_stored_entries(layout, tokens, device),
            written=_written_entries(tokens, device, n_held=n_held, updates=updates),
            masks=_masks(
                model, layout, computed.positions, entry_positions, n_entries + n_more,
                is_causal=is_causal, has_own_attention=has_own_attention,
            ),
            staying=_staying_entries(layout, tokens, device),
        )  # fmt: skip
        layers.append(plan)
        before = tokens.is_computed
    blocks = torch.zeros_like(keep).index_add_(1, layout.block_of_token, roles.used)
    return PassPlan(layers=tuple(layers), blocks=blocks, kept=keep, computed=roles.computed)


def _repeated(plan: LayerPlan) -> LayerPlan:
    """The plan of a layer that does the same as the one before it."""
    if plan.computed.rows_before is None:
        return plan
    return replace(plan, computed=replace(plan.computed, rows_before=None))


@dataclass(frozen=True, kw_only=True)
class _ContextRoles:
    """The roles of context tokens at each layer: (L, Tctx) bool each.

    stored: the stored entry stays, or one that replaces it. recomputed: the entry is computed
    again. computed: the token is recomputed there or at a layer above. used: the stored entry is
    read.
    """

    stored: Tensor
    recomputed: Tensor
    computed: Tensor
    used: Tensor

    def differ_from_layer_before(self, devices: Sequence[torch.device]) -> list[bool]:
        """For each layer, whether its roles or its device differ from those of the layer before."""
        roles = torch.stack((self.stored, self.recomputed, self.computed))
        differing = (roles[:, 1:] != roles[:, :-1]).flatten(2).any(2).any(0).tolist()
        moving = [here != before for before, here in pairwise(devices)]
        return [True, *(any(both) for both in zip(differing, moving, strict=True))]


class _LayerTokens:
    """What one layer does with the prompt's tokens, all on the CPU.

    is_stored, is_recomputed: (T,) bool, see `_ContextRoles`. is_computed: (T,) bool.
    is_attended: (T,) bool, tokens with an entry at the layer; slots: (T,) slots of the entries.
    is_staying: (T,) bool, tokens whose entry stays; staying_slots: (T,) slots among these entries.
    positions: (R,) positions of the computed tokens. used, computed, stored: the context tokens of
    these roles.
    """

    def __init__(
        self, layout: TensorLayout, roles: _ContextRoles, layer: int, n_held: int,
        again: Tensor | None,
    ) -> None:  # fmt: skip
        def in_prompt(of_context: Tensor) -> Tensor:
            """(Tctx,) mask -> (T,)."""
            mask = torch.zeros_like(layout.uncached)
            mask[layout.context_positions] = of_context
            return mask

        self.is_stored = in_prompt(roles.stored[layer])
        self.is_recomputed = in_prompt(roles.recomputed[layer])
        self.is_computed = layout.uncached | in_prompt(roles.computed[layer])
        self.is_attended = self.is_computed | self.is_stored
        self.is_staying = layout.uncached | self.is_stored
        self.is_computed[:n_held] = False
        if again is not None:
            self.is_computed[again] = True
        self.slots = self.is_attended.cumsum(0) - 1
        self.staying_slots = self.is_staying.cumsum(0) - 1
        self.positions = self.is_computed.nonzero()[:, 0]
        self.used = roles.used[layer].nonzero()[:, 0]
        self.computed = roles.computed[layer].nonzero()[:, 0]
        self.stored = roles.stored[layer].nonzero()[:, 0]


def _computed_tokens(
    model: LayeredModel, layout: TensorLayout, tokens: _LayerTokens, before: Tensor | None,
    device: torch.device,
) -> ComputedTokens:  # fmt: skip
    """before: (T,) bool, the tokens that the layer before computes; None at the first layer."""
    positions, n_more = tokens.positions, model.n_more_rows(len(tokens.positions))
    rows_before = None
    if before is not None and not torch.equal(before, tokens.is_computed):
        rows_before = tokens.is_computed[before].nonzero()[:, 0]
        rows_before = torch.cat((rows_before, rows_before[-1:].expand(n_more))).to(device)
    rows = torch.searchsorted(positions, layout.context_positions[tokens.computed])
    return ComputedTokens(
        n_tokens=len(positions),
        positions=torch.cat((positions, positions[-1:].expand(n_more))).to(device),
        rows_before=rows_before, context=tokens.computed, context_rows=rows.to(device),
    )  # fmt: skip


def _stored_entries(
    layout: TensorLayout, tokens: _LayerTokens, device: torch.device
) -> StoredEntries:
    slots = tokens.slots[layout.context_positions[tokens.used]]
    first, end = (int(slots[0]), int(slots[-1]) + 1) if len(slots) else (0, 0)
    of_slots = torch.zeros(end - first, dtype=torch.long)
    of_slots[slots - first] = tokens.used
    return StoredEntries(slots=slice(first, end), tokens=of_slots.to(device))


def _written_entries(
    tokens: _LayerTokens, device: torch.device, *, n_held: int, updates: bool
) -> WrittenEntries:
    positions = tokens.positions
    is_recomputed = tokens.is_recomputed[positions]
    is_written = ~tokens.is_stored[positions] | (is_recomputed & (not updates))
    rows, updated_rows = is_written.nonzero()[:, 0], (is_recomputed & updates).nonzero()[:, 0]
    are_all_computed = not len(tokens.used) and not n_held
    return WrittenEntries(
        rows=None if len(rows) == len(positions) else rows.to(device),
        slots=None if are_all_computed else tokens.slots[positions[rows]].to(device),
        updated_rows=updated_rows.to(device),
        updated_slots=tokens.slots[positions[updated_rows]].to(device),
    )


def _staying_entries(
    layout: TensorLayout, tokens: _LayerTokens, device: torch.device
) -> StayingEntries:
    is_staying, positions = tokens.is_staying, tokens.positions
    at = layout.context_positions[tokens.stored]
    context = ContextSlots(
        tokens=tokens.stored.to(device), slots=tokens.staying_slots[at].to(device),
        changed=tokens.is_recomputed[at].nonzero()[:, 0].to(device),
        other_slots=tokens.staying_slots[is_staying & ~tokens.is_stored].to(device),
    )  # fmt: skip
    stay_all = torch.equal(is_staying, tokens.is_attended)
    rows = is_staying[positions].nonzero()[:, 0]
    return StayingEntries(
        slots=None if stay_all else tokens.slots[is_staying].to(device), context=context,
        query_rows=None if len(rows) == len(positions) else rows.to(device),
        query_slots=tokens.staying_slots[positions[rows]],
    )  # fmt: skip


def _masks(
    model: LayeredModel, layout: TensorLayout, positions: Tensor, entry_positions: Tensor,
    n_padded: int, *, is_causal: bool, has_own_attention: bool,
) -> dict[int | None, Tensor]:  # fmt: skip
    """See `LayerPlan.masks`. positions: (R',) on the layer's device, of the computed tokens."""
    masks: dict[int | None, Tensor] = {}
    windows = {*model.windows_within(layout.n_tokens)} - {None}
    if has_own_attention or not is_causal:
        windows.add(None)
    if windows:  # padding comes after all tokens, so that none sees it
        n_more = n_padded - len(entry_positions)
        seen_at = F.pad(entry_positions, (0, n_more), value=layout.n_tokens)
        behind = positions[:, None] - seen_at.to(positions.device)[None]
    for window in windows:
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        if not has_own_attention:  # once here, not in the attention of every layer
            added = torch.where(seen, 0.0, -torch.inf).to(model.dtype)
            seen = of_groups(added, model.n_heads, model.n_kv_heads, model.head_dim)
        masks[window] = seen
    return masks

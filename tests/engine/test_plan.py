"""Plans against sets of tokens: what each layer of a pass computes, takes and leaves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.engine.blend import LayerPlan, plan_pass
from tests.support.selection_inputs import Request, Shape, request_of, shapes

MANY = settings(max_examples=120, deadline=None)
CPU = torch.device("cpu")


def random_masks(request: Request, kept: float, stale: float, alike: bool) -> tuple[Tensor, Tensor]:
    """(L, Nb) blocks kept, (L, Tctx) tokens to recompute, some of them not kept."""
    generator = torch.Generator().manual_seed(request.shape.seed + 5)
    n_layers = request.shape.n_layers
    n_drawn = 1 if alike else n_layers
    keep = torch.rand(n_drawn, len(request.blocks), generator=generator) < kept
    rows = torch.rand(n_drawn, request.n_context, generator=generator) < stale
    return keep.expand(n_layers, -1).clone(), rows.expand(n_layers, -1).clone()


class Sets:
    """One layer of a pass as sets of positions."""

    def __init__(
        self, request: Request, keep: Tensor, rows: Tensor, uncached: set[int], layer: int,
        n_in_memory: int,
    ) -> None:  # fmt: skip
        at, last = request.positions, request.layout.n_tokens - 1
        block_of = [b.index for b in request.blocks for _ in range(b.start, b.stop)]

        def again(n: int) -> set[int]:
            return {
                at[t]
                for t in range(request.n_context)
                if bool(rows[n, t]) and bool(keep[n, block_of[t]]) and at[t] != last
            }

        self.held = {
            at[t]
            for t in range(request.n_context)
            if bool(keep[layer, block_of[t]]) and at[t] != last
        }
        self.again = again(layer)
        self.carried = set().union(*(again(n) for n in range(layer, request.shape.n_layers)))
        self.in_memory = list(range(n_in_memory))
        self.computed = uncached - set(self.in_memory) | self.carried
        self.entries = sorted(uncached | self.carried | self.held)
        self.staying = sorted(uncached | self.held)


def places(among: list[int], of: list[int]) -> list[int]:
    return [among.index(position) for position in of]


def assert_layer(plan: LayerPlan, sets: Sets, request: Request, mixes: bool, weighs: bool) -> None:
    at = request.positions
    computed, entries = sorted(sets.computed), sets.entries
    assert plan.n_entries == len(entries)
    assert plan.positions.tolist() == computed
    used = sorted(sets.held if mixes else sets.held - sets.again)
    assert [at[t] for t in plan.cached.tolist()] == used
    mixed = sorted(sets.again) if mixes else []
    brought = (sets.computed - sets.held) | (set() if mixes else sets.again)
    given_order = [*sets.in_memory, *used, *computed]  # held in memory, stored, computed
    n_old = len(given_order) - len(computed)
    assert plan.n_held == len(sets.in_memory)
    assert plan.source.tolist() == [
        n_old + computed.index(entry) if entry in brought else given_order.index(entry)
        for entry in entries
    ]
    assert plan.mixed.tolist() == places(computed, mixed)
    assert plan.mixed_slots.tolist() == places(entries, mixed)
    assert [at[t] for t in plan.carried.tolist()] == sorted(sets.carried)
    assert plan.carried_rows.tolist() == places(computed, sorted(sets.carried))
    seen = [[e <= row for e in entries] for row in computed]
    if plan.mask_of(None) is None:
        assert computed == entries and not weighs
    elif weighs:
        assert plan.mask_of(None).tolist() == seen
    else:
        assert plan.mask_of(None).dtype == torch.bfloat16
        assert plan.mask_of(None).exp().tolist() == seen
    of_context = set(at) - {request.layout.n_tokens - 1}
    assert plan.is_context.tolist() == [e in of_context for e in entries]
    staying = entries if plan.staying is None else [entries[i] for i in plan.staying.tolist()]
    assert staying == sets.staying
    assert [at[t] for t in plan.context.tolist()] == sorted(sets.held)
    assert plan.context_slots.tolist() == places(staying, sorted(sets.held))
    assert [at[t] for t in plan.context[plan.changed].tolist()] == sorted(sets.again)
    others = [position for position in staying if position not in sets.held]
    assert plan.other_slots.tolist() == places(staying, others)
    asking = [position for position in computed if position in set(staying)]
    assert [computed[i] for i in plan.query_rows.tolist()] == asking
    assert plan.query_slots.tolist() == places(staying, asking)


@MANY
@given(
    st.one_of(shapes(), shapes(window=0)),
    st.sampled_from((0.0, 0.4, 1.0)),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
)
def test_every_layer_is_that_of_the_sets(
    shape: Shape,
    kept: float,
    stale: float,
    alike: bool,
    mixes: bool,
    weighs: bool,
    most_in_memory: int,
) -> None:
    request = request_of(shape)
    layout = request.layout
    keep, rows = random_masks(request, kept, stale, alike)
    uncached = set(layout.uncached.nonzero()[:, 0].tolist())
    first = next(at for at in range(layout.n_tokens) if at not in uncached or at == max(uncached))
    in_memory = min(most_in_memory, first)
    plan = plan_pass(
        layout, keep, rows, devices=[CPU] * len(keep), dtype=torch.bfloat16,
        n_held=in_memory, mixes=mixes, weighs=weighs,
    )  # fmt: skip
    assert len(plan.layers) == shape.n_layers and torch.equal(plan.kept, keep)
    at = request.positions
    before: list[int] | None = None
    for layer, of_layer in enumerate(plan.layers):
        sets = Sets(request, keep, rows, uncached, layer, in_memory)
        assert_layer(of_layer, sets, request, mixes, weighs)
        computed = sorted(sets.computed)
        if of_layer.narrow is None:
            assert before is None or before == computed
        else:
            assert [before[i] for i in of_layer.narrow.tolist()] == computed
        before = computed
        used = sets.held if mixes else sets.held - sets.again
        blocks = {b.index for b in request.blocks if used & {at[t] for t in range(b.start, b.stop)}}
        assert set(plan.blocks[layer].nonzero()[:, 0].tolist()) == blocks
        carried = {at[t] for t in plan.computed[layer].nonzero()[:, 0].tolist()}
        assert carried == sets.carried


def test_layers_that_do_the_same_share_their_plan() -> None:
    """So that planning costs no more for forty layers than for a few kinds of them."""
    request = request_of(Shape(seed=1, lengths=(30, 20), n_layers=4))
    keep, rows = random_masks(request, 0.6, 0.5, alike=True)
    rows[2:] = False
    first, second, third, fourth = plan_pass(
        request.layout, keep, rows, devices=[CPU] * len(keep), dtype=torch.bfloat16
    ).layers
    assert first is second and third is not second
    assert third.narrow is not None and fourth.narrow is None
    assert fourth.cached is third.cached


def test_a_plan_changes_nothing_that_it_is_given() -> None:
    request = request_of(Shape(seed=2, lengths=(30, 20), n_layers=3))
    keep, rows = random_masks(request, 0.6, 0.5, alike=False)
    given_now = [keep.clone(), rows.clone(), request.layout.uncached.clone()]
    plan_pass(request.layout, keep, rows, devices=[CPU] * len(keep), dtype=torch.bfloat16)
    for before, after in zip(given_now, (keep, rows, request.layout.uncached), strict=True):
        assert torch.equal(before, after)

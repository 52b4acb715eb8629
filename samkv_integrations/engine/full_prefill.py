"""When a context is computed as a whole, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samkv_integrations.engine.costs import MARGIN, CostModel
from samkv_integrations.engine.held import Held
from samkv_integrations.engine.request import Request
from samkv_integrations.methods import Method
from samkv_integrations.methods.base import overwrite
from samkv_integrations.methods.parts import RecomputeAll, RecomputeInexact, SelectAll
from samkv_integrations.prompt.layout import Layout

NOTHING = Held()


def is_whole(
    method: Method,
    costs: CostModel | None,
    layout: Layout,
    missed: Sequence[int] = (),
    *,
    held: Held = NOTHING,
) -> bool:
    """Whether a method computes the context as a whole, which is full prefill.

    missed: tokens of each uncached chunk that counts as a cached one. held: what of the prompt's
    beginning neither way computes.
    """
    if layout.n_context + sum(missed) <= method.recompute.whole_tokens:
        return True
    if not method.whole_if_faster:
        return False
    assert costs is not None
    two_passes = two_passes_s(method, costs, layout, missed, held=held)
    return two_passes > MARGIN * costs.full_prefill_s(layout.n_tokens, held.n_whole)


def two_passes_s(
    method: Method,
    costs: CostModel,
    layout: Layout,
    missed: Sequence[int] = (),
    *,
    held: Held = NOTHING,
) -> float:
    """A layer's share of a request that is not computed as a whole; arguments as in `is_whole`."""
    n_context, n_chunks = layout.n_context + sum(missed), layout.n_chunks + len(missed)
    n_probed = int(method.select.probe_tokens(layout).sum())
    ratio = method.recompute.most_ratio(n_context, n_chunks, scored=n_probed > 0)
    return costs.two_passes_s(layout.n_tokens, n_context, n_probed, ratio, held.n_blended)


def as_full_prefill(request: Request) -> Method:
    """The request's method with the whole context computed."""
    # entries of few bits are never exact, wherever their chunk stands
    is_rounded = request.fingerprint.entry_format.is_quantised
    everything = RecomputeAll() if is_rounded else RecomputeInexact()
    return replace(
        request.method, select=SelectAll(), recompute=everything, update=overwrite, eviction=None
    )

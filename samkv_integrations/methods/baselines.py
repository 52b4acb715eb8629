"""The baselines without a paper: full prefill, and caches as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from samkv_integrations.methods.base import Method, Recompute

if TYPE_CHECKING:
    from samkv_integrations.prompt.layout import Layout, Mask


@dataclass(frozen=True, kw_only=True)
class RecomputeAll(Recompute):
    """Recompute every token: full prefill."""

    uses_caches: ClassVar[bool] = False

    def choose(self, layout: Layout) -> Mask:
        return np.ones(layout.n_context, np.bool_)


@dataclass(frozen=True, kw_only=True)
class RecomputeInexact(Recompute):
    """Recompute every token whose cached entry may differ from full prefill's."""

    def choose(self, layout: Layout) -> Mask:
        return ~layout.exact[layout.chunk_of_token]


RECOMPUTE = Method(
    name="recompute",
    paper="-",
    summary="full prefill: every chunk computed again from its text",
    recompute=RecomputeAll(),
)
REUSE = Method(
    name="reuse",
    paper="-",
    summary="whole caches at their true positions, nothing recomputed",
)
REUSE_LOCAL = Method(
    name="reuse-local",
    paper="Reuse in arXiv 2508.11661",
    summary="whole caches at the positions of their prefill, nothing recomputed",
    positions="local",
)

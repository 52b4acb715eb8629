"""The reference points: full prefill, and reuse of whole caches with and without positions."""

from __future__ import annotations

from samkv_integrations.methods.base import Method
from samkv_integrations.methods.parts import RecomputeAll, RecomputeNone, SelectAll


def recompute() -> Method:
    """Full prefill: all text through the model, no cache used."""
    return Method(
        name="recompute",
        paper="-",
        summary="full prefill: every chunk computed again from its text",
        select=SelectAll(),
        recompute=RecomputeAll(),
    )


def reuse() -> Method:
    """Every cached token, rotated to its true position; nothing recomputed."""
    return Method(
        name="reuse",
        paper="-",
        summary="whole caches at their true positions, nothing recomputed",
        select=SelectAll(),
        recompute=RecomputeNone(),
    )


def reuse_local() -> Method:
    """Every cached token at the position where it was prefilled (the papers' Reuse)."""
    return Method(
        name="reuse-local",
        paper="Reuse in arXiv 2508.11661",
        summary="whole caches at the positions of their prefill, nothing recomputed",
        select=SelectAll(),
        recompute=RecomputeNone(),
        positions="local",
    )

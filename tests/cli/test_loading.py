"""Evictions as command lines name them."""

from __future__ import annotations

from dataclasses import replace

from samkv_integrations import EVICTIONS
from samkv_integrations.cli.loading import eviction_of


def test_a_ratio_is_the_budget_of_the_rule() -> None:
    half = replace(EVICTIONS["h2o"], budget_ratio=0.5)
    assert eviction_of("h2o", 0.5) == half
    assert (eviction_of(None), eviction_of("none")) == (None, "none")

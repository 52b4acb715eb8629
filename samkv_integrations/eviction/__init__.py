"""The eviction rules: which KV entries an answer goes on with. One file a paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from samkv_integrations.errors import UnknownOption
from samkv_integrations.eviction.base import Eviction
from samkv_integrations.eviction.h2o import H2O
from samkv_integrations.eviction.pyramidkv import PyramidKV
from samkv_integrations.eviction.quest import Quest
from samkv_integrations.eviction.sage_kv import SageKV
from samkv_integrations.eviction.snapkv import SnapKV
from samkv_integrations.eviction.streaming_llm import StreamingLLM

__all__ = ["EVICTIONS", "Eviction", "Quest", "get_eviction"]

NO_EVICTION = "none"

EVICTIONS: Mapping[str, Eviction] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            StreamingLLM(budget_ratio=0.2),
            H2O(budget_ratio=0.2),
            SnapKV(budget_ratio=0.2),
            PyramidKV(budget_ratio=0.2),
            SageKV(budget_ratio=0.2),
            Quest(budget_ratio=0.1),
        )
    }
)
"""Name -> eviction rule with its usual budget."""


def get_eviction(name: str | Eviction | None) -> Eviction | None:
    """The rule called ``name``; a rule passes through; None for None and for ``"none"``.

    Raises UnknownOption with the names that there are.
    """
    if name is None or name == NO_EVICTION:
        return None
    if isinstance(name, Eviction):
        return name
    if not isinstance(name, str) or name not in EVICTIONS:
        raise UnknownOption.among("eviction", name, (*EVICTIONS, NO_EVICTION))
    return EVICTIONS[name]


def with_budget(rule: Eviction, ratio: float) -> Eviction:
    """The rule with another budget, as a share. Raises InvalidOption if it is out of range."""
    return replace(rule, budget_tokens=None, budget_ratio=ratio)

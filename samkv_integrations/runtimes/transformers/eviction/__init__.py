"""The eviction rules, those that drop entries and those that do not, and the table of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.runtimes.transformers.eviction.base import (
    DroppingEviction,
    Eviction,
    SparseEviction,
)
from samkv_integrations.runtimes.transformers.eviction.dropping import (
    H2O,
    PyramidKV,
    SageKV,
    SnapKV,
    StreamingLLM,
)
from samkv_integrations.runtimes.transformers.eviction.sparse import (
    InfLLM,
    Quest,
    RetrievalAttention,
)

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
            InfLLM(budget_ratio=0.2),
            RetrievalAttention(budget_ratio=0.1),
        )
    }
)
"""Name -> eviction rule with its usual budget."""


def get_eviction(name: str | Eviction | None) -> Eviction | None:
    """The rule called ``name``; a rule is returned as it is; None for None and ``"none"``.

    Raises UnknownOption with the known names, InvalidOption for a rule of an unsupported kind.
    """
    if name is None or name == NO_EVICTION:
        return None
    if isinstance(name, Eviction):
        if not isinstance(name, DroppingEviction | SparseEviction):
            raise InvalidOption(
                f"eviction {name.name!r} is a {type(name).__name__}, which says neither what it "
                "drops nor what a step attends to; subclass DroppingEviction or SparseEviction, of "
                "samkv_integrations.runtimes.transformers.eviction.base"
            )
        return name
    if not isinstance(name, str) or name not in EVICTIONS:
        raise UnknownOption.among("eviction", name, (*EVICTIONS, NO_EVICTION))
    return EVICTIONS[name]


def with_budget(rule: Eviction, ratio: float) -> Eviction:
    """The rule with another budget, as a share of the prompt. Raises InvalidOption."""
    return replace(rule, budget_tokens=None, budget_ratio=ratio)

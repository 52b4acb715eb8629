"""What an eviction rule is, and the table of all. The rules themselves belong to a runtime."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from samkv_integrations.errors import Given, InvalidOption, UnknownOption
from samkv_integrations.methods.table import Table

NO_EVICTION = "none"
"""The name that stands for keeping all entries."""


@dataclass(frozen=True, kw_only=True)
class Eviction(ABC):
    """A rule for the KV entries that the tokens after the first attend to.

    Subclass `DroppingEviction` or `SparseEviction` of
    `samkv_integrations.runtimes.transformers.eviction.base`, and set ``name``, ``paper`` and
    ``summary``.

    budget_tokens, budget_ratio: entries of each layer and head, as a number or as a share of the
        whole prompt; give exactly one. A share is raised to `min_tokens` if it is smaller.

    Raises InvalidOption for a budget that the rule cannot keep.
    """

    budget_tokens: int | None = None
    budget_ratio: float | None = None

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    at_least: ClassVar[Mapping[str, int]] = {}
    """Name -> smallest value of the rule's own options that are whole numbers."""

    def __post_init__(self) -> None:
        for option, least in self.at_least.items():
            value = getattr(self, option)
            if type(value) is not int or value < least:
                raise InvalidOption(
                    Given(option, value),
                    f" of {self.name!r}; it must be a whole number from {least} on",
                )
        tokens, ratio = self.budget_tokens, self.budget_ratio
        if (tokens is None) == (ratio is None):
            raise InvalidOption(
                Given("budget_tokens", tokens),
                " and ",
                Given("budget_ratio", ratio),
                f" of {self.name!r}; give exactly one of them, and set the other one to None",
            )
        if ratio is not None and not 0 < ratio <= 1:
            raise InvalidOption(
                Given("budget_ratio", ratio),
                f" of {self.name!r}; it must be above 0 and at most 1, a share of the prompt (give "
                "budget_tokens for a number of entries)",
            )
        if tokens is not None and not (type(tokens) is int and tokens >= self.min_tokens):
            raise InvalidOption(
                Given("budget_tokens", tokens),
                f" of {self.name!r}; it must be a whole number from {self.min_tokens} on, as the "
                "rule with its other options always keeps that many entries",
            )

    @property
    @abstractmethod
    def min_tokens(self) -> int:
        """The smallest budget that holds the entries that the rule always keeps."""

    @property
    def n_queries(self) -> int | None:
        """Number of the prompt's last tokens whose queries the rule needs; None for all.

        The entries of all other tokens may come from memory.
        """
        return 0

    def budget(self, n_tokens: int) -> int:
        """Entries of a layer, mean over the layers."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_ratio is not None
        return max(self.min_tokens, math.floor(self.budget_ratio * n_tokens))


_RULES = "samkv_integrations.runtimes.transformers.eviction"

EVICTIONS: Mapping[str, Eviction] = Table[Eviction](
    "eviction",
    Eviction,
    {
        "streaming-llm": f"{_RULES}.dropping:STREAMING_LLM",
        "h2o": f"{_RULES}.dropping:HEAVY_HITTERS",
        "snapkv": f"{_RULES}.dropping:SNAPKV",
        "pyramidkv": f"{_RULES}.dropping:PYRAMIDKV",
        "sage-kv": f"{_RULES}.dropping:SAGE_KV",
        "quest": f"{_RULES}.sparse:QUEST",
        "infllm": f"{_RULES}.sparse:INFLLM",
        "retrieval-attention": f"{_RULES}.sparse:RETRIEVAL_ATTENTION",
    },
)
"""Name -> eviction rule with its usual budget. Listing the names imports none of them."""


def get_eviction(name: str | Eviction | None) -> Eviction | None:
    """The rule called ``name``; a rule is returned as it is; None for None and ``"none"``.

    Raises UnknownOption with the known names, InvalidOption for a rule of an unsupported kind.
    """
    if name is None or name == NO_EVICTION:
        return None
    if isinstance(name, Eviction):
        if not (hasattr(name, "keeper") or hasattr(name, "chooser")):
            raise InvalidOption(
                f"eviction {name.name!r} is a {type(name).__name__}; it must have a keeper, or a "
                "chooser: subclass DroppingEviction or SparseEviction, of "
                f"{_RULES}.base"
            )
        return name
    if not isinstance(name, str) or name not in EVICTIONS:
        raise UnknownOption.among("eviction", name, (*EVICTIONS, NO_EVICTION))
    return EVICTIONS[name]


def with_budget(rule: Eviction, ratio: float) -> Eviction:
    """The rule with another budget, as a share of the prompt. Raises InvalidOption."""
    return replace(rule, budget_tokens=None, budget_ratio=ratio)

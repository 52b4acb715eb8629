"""Values of options: lists, methods with their options, evictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samkv_integrations.errors import InvalidOption, UnknownOption

if TYPE_CHECKING:
    from samkv_integrations.eviction import Eviction
    from samkv_integrations.methods import Method


def words(text: str) -> list[str]:
    """The parts between commas; empty ones are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def shares(option: str, text: str) -> list[float]:
    """Numbers; InvalidOption names ``option`` if one is none."""
    try:
        return [float(part) for part in words(text)]
    except ValueError as error:
        raise InvalidOption(f"{option} {text!r}; give numbers, as in 0.1,0.2") from error


def counts(option: str, text: str) -> list[int]:
    """Whole numbers; InvalidOption names ``option`` if one is none."""
    try:
        return [int(part) for part in words(text)]
    except ValueError as error:
        raise InvalidOption(f"{option} {text!r}; give whole numbers, as in 4,8") from error


def given_methods(names: Sequence[str], settings: Sequence[str]) -> list[Method]:
    """The methods called ``names``; each of ``settings`` changes those that have such an option.

    None if neither names nor options are given: then the engine chooses. Options without a name
    are those of the default method.

    Raises:
        UnknownOption: there is no such method, or none of them has such an option.
        InvalidOption: a value of the wrong kind, or out of range.
    """
    from samkv_integrations.methods import DEFAULT_METHOD, get_method
    from samkv_integrations.methods.base import option_names, with_option

    if settings and not names:
        names = [DEFAULT_METHOD]
    methods = [get_method(name) for name in names]
    for setting in settings:
        name = setting.partition("=")[0]
        known = {option for method in methods for option in option_names(method)}
        if name not in known:
            raise UnknownOption.among(f"option of {', '.join(names)}", name, known or {"none"})
        methods = [
            with_option(method, setting) if name in option_names(method) else method
            for method in methods
        ]
    return methods


def eviction_of(name: str | None, budget_ratio: float | None = None) -> Eviction | str | None:
    """The rule called ``name``, with another budget if one is given; None and "none" stay.

    Raises:
        UnknownOption: there is no such rule.
        InvalidOption: the budget is out of range, or there is nothing that it could be for.
    """
    from samkv_integrations.eviction import get_eviction, with_budget

    rule = get_eviction(name)
    if budget_ratio is None:
        return rule or name
    if rule is None:
        raise InvalidOption(
            f"an eviction budget of {budget_ratio} without an eviction; name one, or leave the "
            "budget out"
        )
    return with_budget(rule, budget_ratio)

"""Options that name methods and evictions, as they come from a command line."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from samkv_integrations.bench.variants import check_shares
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.eviction import Eviction, get_eviction
from samkv_integrations.methods import Method, get_method
from samkv_integrations.methods.base import option_names


def methods_of(names: Sequence[str], settings: Sequence[str] = ()) -> list[Method]:
    """The methods called ``names``; each of ``settings`` changes those that have such an option.

    Raises:
        UnknownOption: there is no such method, or none of them has such an option.
        InvalidOption: a value of the wrong kind, or out of range.
    """
    methods = [get_method(name) for name in names]
    for setting in settings:
        name, _, text = setting.partition("=")
        known = {option for method in methods for option in option_names(method)}
        if name not in known:
            raise UnknownOption.among(f"option of {', '.join(names)}", name, known or {"none"})
        methods = [
            _changed(method, name, text) if name in option_names(method) else method
            for method in methods
        ]
    return methods


def eviction_of(name: str | None, budget_ratio: float | None = None) -> Eviction | str | None:
    """The rule called ``name``, with another budget if one is given; None and "none" stay.

    Raises:
        UnknownOption: there is no such rule.
        InvalidOption: the budget is out of range, or there is nothing that it could be for.
    """
    rule = get_eviction(name)
    if budget_ratio is None:
        return rule or name
    if rule is None:
        raise InvalidOption(
            f"an eviction budget of {budget_ratio} without an eviction; name one, or leave the "
            "budget out"
        )
    return _with_budget(rule, budget_ratio)


def evictions_of(texts: Sequence[str]) -> dict[str, Eviction | None]:
    """``NAME``, ``NAME@RATIO`` or ``none`` -> the rule that it names, None for ``none``.

    Raises:
        UnknownOption: there is no such rule.
        InvalidOption: the ratio is none, is out of range, or there is nothing that it could be for.
    """
    return {text: _named_eviction(text) for text in texts}


def _named_eviction(text: str) -> Eviction | None:
    name, at, ratio = text.partition("@")
    rule = get_eviction(name)
    if not at:
        return rule
    if rule is None:
        raise InvalidOption(f"eviction {text!r}; 'none' has no ratio")
    try:
        share = float(ratio)
    except ValueError as error:
        raise InvalidOption(f"eviction {text!r}; give NAME or NAME@RATIO") from error
    check_shares(f"eviction {text!r}", [share])
    return _with_budget(rule, share)


def _with_budget(rule: Eviction, ratio: float) -> Eviction:
    return replace(rule, budget_tokens=None, budget_ratio=ratio)


def _changed(method: Method, name: str, text: str) -> Method:
    part_name, field = name.split(".")
    part: Any = getattr(method, part_name)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text  # a word
    hint = get_type_hints(type(part))[field]
    if not _fits(value, hint):
        raise InvalidOption(f"{name}={text} of {method.name!r}: {value!r} is not {_words(hint)}")
    part = replace(part, **{field: value})
    return replace(method, **{part_name: part})


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):  # a union
        return any(_fits(value, kind) for kind in get_args(hint))
    return type(value) in ((int, float) if hint is float else (hint,))


def _words(hint: Any) -> str:  # noqa: ANN401
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return " or ".join(map(_words, get_args(hint))) if get_args(hint) else _NAMES[hint]


_NAMES = {float: "a number", int: "a whole number", bool: "True or False", type(None): "None"}

"""The options of a method as words, ``NAME=VALUE``: of command lines, and of files of settings."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.methods.base import Method, option_names

_NAMES = {float: "a number", int: "a whole number", bool: "True or False", type(None): "None"}


def with_option(method: Method, setting: str) -> Method:
    """The method with one option changed. setting: ``NAME=VALUE``, NAME out of `option_names`.

    Raises:
        UnknownOption: it has no such option.
        InvalidOption: a value of the wrong kind, or out of range.
    """
    name, _, text = setting.partition("=")
    known = option_names(method)
    if name not in known:
        raise UnknownOption.among(f"option of {method.name}", name, known or ("none",))
    part_name, field = name.split(".")
    part: Any = getattr(method, part_name)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text  # a word
    hint = get_type_hints(type(part))[field]
    if not _fits(value, hint):
        raise InvalidOption(f"{name}={text} of {method.name!r}: {value!r} is not {_words(hint)}")
    return replace(method, **{part_name: replace(part, **{field: value})})


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

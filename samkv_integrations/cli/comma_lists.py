"""Options of the benches that take several values: 1,4,8."""

from __future__ import annotations

from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import METHODS


def words(text: str) -> list[str]:
    """The parts between commas; empty ones are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def method_names(text: str) -> list[str]:
    """Names of methods; ``all`` for every one."""
    return list(METHODS) if text == "all" else words(text)


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

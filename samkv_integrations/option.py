"""How an option is declared, what its values may be, and how they are checked.

`samkv_integrations.options` has the declarations. Of this package the module imports the errors
only, so that every other module may use its types and checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import TIMEOUT_MAX
from typing import Any, ForwardRef, Literal, get_type_hints

from samkv_integrations.errors import Given, InvalidOption, UnknownOption

STORE_BITS = (4, 8, 16)
"""Bits of a stored number; 16 stands for the model's own dtype, even if that is float32."""
DEFAULT_STORE_BITS = 4

DTYPES = ("auto", "float32", "bfloat16", "float16")

OnMiss = Literal["text", "compute", "error"]
PrefixPolicy = Literal["auto", "documents", "bos", "none"]

Check = Callable[[str, Any], object]
"""Takes an option's name and value; raises InvalidOption or UnknownOption for a wrong value."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option beside its name and its type.

    description: one sentence, the help of its flag. more: further sentences, for the reference and
        the fields of LLMs.
    default: the value of an option that is not given. unset: the meaning of None; empty if it needs
        no mention.
    check: called with each value, except None where that is the default. None: every value is
        allowed; LLMs and the command line still check the type.
    of_llms: whether the LLMs of LlamaIndex and LangChain have a field of this name; LlamaIndex's
        take options of sampling in generate_kwargs.
    has_flag: whether commands that answer have a flag of this name. is_everyday: whether their help
        shows it among the first flags.
    """

    description: str
    default: Any
    more: str = ""
    unset: str = ""
    check: Check | None = None
    of_llms: bool = True
    has_flag: bool = False
    is_everyday: bool = False

    @property
    def text(self) -> str:
        """All sentences, with the meaning of None."""
        unset = f"None: {self.unset}." if self.unset else ""
        return " ".join(filter(None, (self.description, self.more, unset)))


Declared = Mapping[str, tuple[Any, Option]]
"""Name -> type and declaration of an option."""


@cache
def declared(group: type) -> Declared:
    """The options that a TypedDict declares."""
    hints: Mapping[str, Any] = group.__annotations__
    if any(isinstance(hint, ForwardRef) for hint in hints.values()):
        hints = get_type_hints(group, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def check_options(group: type, given: Mapping[str, Any]) -> None:
    """Raises InvalidOption or UnknownOption for the first value that a declaration refuses."""
    for name, (_, option) in declared(group).items():
        if option.check is not None and name in given:
            if not (given[name] is None is option.default):
                option.check(name, given[name])


def complete(group: type, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The options of a group, checked, with the defaults of those that are not given.

    kind: what an option is called in an error. Raises UnknownOption or InvalidOption.
    """
    known = declared(group)
    for name in given.keys() - known.keys():
        raise UnknownOption.among(kind, name, known)
    check_options(group, given)
    return {name: option.default for name, (_, option) in known.items()} | dict(given)


# -- checks ------------------------------------------------------------------------------------


def among(*allowed: object) -> Check:
    """The check of a value that must be one of a few."""

    def check(name: str, value: object) -> None:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise InvalidOption(Given(name, value), f"; allowed: {', '.join(map(str, allowed))}")

    return check


def number(must_be: str, allows: Callable[[Any], bool], *, is_whole: bool = False) -> Check:
    """The check of a number. must_be: what is allowed, in words. allows: must be false for NaN."""

    def check(name: str, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            kind = "a whole number" if is_whole else "a number"
            raise InvalidOption(Given(name, value), f"; it must be {kind}")
        if not allows(value):
            raise InvalidOption(Given(name, value), f"; it must be {must_be}")

    return check


def check_dtype(name: str, dtype: object) -> None:
    """Raises InvalidOption unless ``dtype`` is one of `DTYPES`, or torch's of that name."""
    InvalidOption.unless_among(name, str(dtype).removeprefix("torch."), DTYPES)


def check_shares(name: str, shares: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption unless ``shares`` are numbers, 0 or more, and not all 0."""
    is_list = isinstance(shares, Sequence) and not isinstance(shares, str)
    are_numbers = is_list and all(type(share) in (int, float) for share in shares)
    if not (are_numbers and all(0 <= share < math.inf for share in shares) and any(shares)):
        raise InvalidOption(
            Given(name, shares), "; it must be a list of numbers, 0 or more, such as [0.7, 0.3]"
        )


def check_text(name: str, text: object) -> None:
    """Raises InvalidOption for anything but a string."""
    if not isinstance(text, str):
        raise InvalidOption(Given(name, text), "; it must be a string")


def check_stop(name: str, stop: object) -> None:
    """Raises InvalidOption unless ``stop`` is a list of strings, none of them empty."""
    is_list = isinstance(stop, Collection) and not isinstance(stop, str)
    for text in stop if is_list else ("",):  # type: ignore[attr-defined]  # a Collection
        if not isinstance(text, str) or not text:
            raise InvalidOption(Given(name, stop), "; it must be a list of non-empty strings")


def check_timeout(name: str, timeout: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption unless ``timeout`` is above 0 and at most `TIMEOUT_MAX` seconds."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout <= TIMEOUT_MAX):
        raise InvalidOption(
            Given(name, timeout), f"; it must be above 0 and at most {TIMEOUT_MAX:.0f} seconds, or "
            "None for no limit",
        )  # fmt: skip


def check_size(name: str, size: Any) -> None:  # noqa: ANN401
    """Raises InvalidOption unless ``size`` is 0, or a size as in `bytes_of`."""
    if size not in (0, "0"):
        bytes_of(name, size)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?", re.IGNORECASE)


def bytes_of(name: str, size: int | str) -> int:
    """The bytes of a size: a whole number, or a text such as ``500MB``, ``1.5 GiB`` or ``4096``.

    name: the name of the option. Raises InvalidOption for anything else.
    """
    n_bytes: float | None = size if type(size) is int else None
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        power = "_kmgt".index((found[2] or "_").lower())
        n_bytes = float(found[1]) * (1024 if found[3] else 1000) ** power
    if n_bytes is None or not 1 <= n_bytes < 2**63:  # SQLite's largest integer
        raise InvalidOption(
            Given(name, size),
            "; it must be a number of bytes, 1 to 2^63 - 1, or a size such as 20GB",
        )
    return int(n_bytes)

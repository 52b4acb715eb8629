"""How an option is declared: a name, a type, an `Option`, and a docstring below.

`samkv_integrations.options` declares all of them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ForwardRef, get_type_hints

Declared = Mapping[str, tuple[Any, "Option"]]
"""Name -> type and declaration of an option."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option beside its name and its type.

    default: the value of an option that is not given.
    description: one sentence for the reference, the fields of LLMs and the command line, which
        `declared` takes from the docstring below the option.
    unset: what None stands for; empty if there is no None.
    allows, bounds: whether a value is allowed, and what is allowed, in words. Without them an
        engine accepts any value: only LLMs and the command line check the type by themselves.
    check: in place of these two, raises for a value that is not allowed.
    in_llms: whether the LLMs of LlamaIndex and LangChain have a field of this name.
    flag: whether commands that answer have a flag of this name, which
        `samkv_integrations.cli.arguments` makes of the declaration.
    """

    default: Any
    description: str = ""
    unset: str = ""
    allows: Callable[[Any], bool] | None = None
    bounds: str = ""
    check: Callable[[Any], object] | None = None
    in_llms: bool = True
    flag: bool = True

    @property
    def sentence(self) -> str:
        """The description, with what None stands for."""
        return f"{self.description} None: {self.unset}." if self.unset else self.description


@cache
def declared(options: type) -> Declared:
    """The options that a TypedDict declares."""
    hints: Mapping[str, Any] = options.__annotations__
    if any(isinstance(hint, ForwardRef) for hint in hints.values()):
        hints = get_type_hints(options, include_extras=True)
    found = {}
    for name, hint in hints.items():
        option = hint.__metadata__[0]
        if not option.description:
            option = replace(option, description=docstring_of(options, name))
        found[name] = (hint.__origin__, option)
    return found


def docstring_of(group: type, name: str) -> str:
    """The docstring below a field of a class, in one line; empty without one."""
    docs = _docstrings(group.__module__)
    return docs.get((group.__name__, name)) or docs.get(("", name), "")


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Class and name of an option -> its docstring; without a class, the first one of the name."""
    found: dict[tuple[str, str], str] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # an installation without sources has no descriptions
        return found
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for row, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    text = " ".join(str(below.value.value).replace("``", "").split())
                    found[node.name, row.target.id] = text
                    found.setdefault(("", row.target.id), text)
    return found

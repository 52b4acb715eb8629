"""How an option is declared: its default, its description, and what values it takes.

`samkv_integrations.engine.options` declares the options of models, stores, engines and answers;
`samkv_integrations.model.sampling` those of sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option. Its name and its type are those of the annotation that holds it.

    default: the value of an option that is not given.
    description: one sentence, for the docs, the fields of LLMs and the command line.
    unset: what None stands for, in words; empty if the description says it.
    allows, bounds: whether a value is allowed, and what is, in words.
    check: in place of these two, raises for a value that is not allowed.
    plain: the type of values that can be written down, where objects are allowed beside them.
    in_llms: whether the LLMs of LlamaIndex and LangChain have a field of this name.
    flag: whether commands that answer have a flag of this name; else `cli.arguments` decides.
    """

    default: Any
    description: str
    unset: str = ""
    allows: Callable[[Any], bool] | None = None
    bounds: str = ""
    check: Callable[[Any], object] | None = None
    plain: Any = None
    in_llms: bool = True
    flag: bool = True

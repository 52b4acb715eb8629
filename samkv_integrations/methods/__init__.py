"""The methods, those that choose by token ids, and the table of all.

Methods that need what a model computes are in `samkv_integrations.runtimes.transformers.papers`.
"""

from __future__ import annotations

from collections.abc import Mapping

from samkv_integrations.errors import InvalidOption, MissingExtra, UnknownOption
from samkv_integrations.methods.base import Method
from samkv_integrations.methods.table import Table

__all__ = ["METHODS", "Method", "get_method"]

_HERE = "samkv_integrations.methods"
_PAPERS = "samkv_integrations.runtimes.transformers.papers"

METHODS: Mapping[str, Method] = Table[Method](
    "method",
    Method,
    {
        "recompute": f"{_HERE}.baselines:RECOMPUTE",
        "reuse": f"{_HERE}.baselines:REUSE",
        "reuse-local": f"{_HERE}.baselines:REUSE_LOCAL",
        "multi-infllm": f"{_PAPERS}.multi_infllm:MULTI_INFLLM",
        "cacheblend": f"{_PAPERS}.cacheblend:CACHEBLEND",
        "epic": f"{_HERE}.epic:EPIC",
        "a3": f"{_PAPERS}.a3:A3",
        "ape": f"{_PAPERS}.ape:APE",
        "samkv-overwrite": f"{_PAPERS}.samkv:SAMKV_OVERWRITE",
        "samkv-fusion": f"{_PAPERS}.samkv:SAMKV_FUSION",
        "samkv-guided": f"{_HERE}.guided:SAMKV_GUIDED",
        "auto": f"{_HERE}.guided:AUTO",
    },
    group="samkv.methods",
)
"""Name -> method, in the order of the tables in the docs. Listing the names imports none of them.

Other distributions add methods by entry points of the group ``samkv.methods``.
"""


def get_method(name: str | Method) -> Method:
    """The method called ``name``; a `Method` is returned as it is.

    Raises UnknownOption, and InvalidOption for a method of another distribution that cannot be
    loaded.
    """
    if isinstance(name, Method):
        return name
    if not isinstance(name, str) or name not in METHODS:
        raise UnknownOption.among("method", name, METHODS)
    return METHODS[name]


def names_by_tokens() -> list[str]:
    """Names of the methods that any runtime can run, in the order of `METHODS`.

    Methods that cannot be loaded are left out, such as those that need an extra.
    """
    names = []
    for name in METHODS:
        try:
            method = METHODS[name]
        except (InvalidOption, MissingExtra):
            continue
        if method.is_by_tokens:
            names.append(name)
    return names

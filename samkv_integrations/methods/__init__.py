"""The methods, one file for each paper, and the table of all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from samkv_integrations.errors import UnknownOption
from samkv_integrations.methods.base import Method
from samkv_integrations.methods.baselines import RECOMPUTE, REUSE, REUSE_LOCAL
from samkv_integrations.methods.epic import EPIC
from samkv_integrations.methods.guided import AUTO, SAMKV_GUIDED
from samkv_integrations.runtimes.transformers.papers.a3 import A3
from samkv_integrations.runtimes.transformers.papers.ape import APE
from samkv_integrations.runtimes.transformers.papers.cacheblend import CACHEBLEND
from samkv_integrations.runtimes.transformers.papers.multi_infllm import MULTI_INFLLM
from samkv_integrations.runtimes.transformers.papers.samkv import SAMKV_FUSION, SAMKV_OVERWRITE

__all__ = ["METHODS", "Method", "get_method"]

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            RECOMPUTE,
            REUSE,
            REUSE_LOCAL,
            MULTI_INFLLM,
            CACHEBLEND,
            EPIC,
            A3,
            APE,
            SAMKV_OVERWRITE,
            SAMKV_FUSION,
            SAMKV_GUIDED,
            AUTO,
        )
    }
)
"""Name -> method, in the order of the tables in the docs."""


def get_method(name: str | Method) -> Method:
    """The method called ``name``; a `Method` is returned as it is. Raises UnknownOption."""
    if isinstance(name, Method):
        return name
    if not isinstance(name, str) or name not in METHODS:
        raise UnknownOption.among("method", name, METHODS)
    return METHODS[name]

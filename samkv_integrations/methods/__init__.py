"""The methods, one file for each paper, and the table of all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from samkv_integrations.errors import UnknownOption
from samkv_integrations.methods.a3 import a3
from samkv_integrations.methods.ape import ape
from samkv_integrations.methods.base import Method
from samkv_integrations.methods.baselines import recompute, reuse, reuse_local
from samkv_integrations.methods.cacheblend import cacheblend
from samkv_integrations.methods.epic import auto, epic
from samkv_integrations.methods.guided import samkv_guided
from samkv_integrations.methods.multi_infllm import multi_infllm
from samkv_integrations.methods.samkv import samkv_fusion, samkv_overwrite

__all__ = ["METHODS", "Method", "get_method"]

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            recompute(),
            reuse(),
            reuse_local(),
            multi_infllm(),
            cacheblend(),
            epic(),
            a3(),
            ape(),
            samkv_overwrite(),
            samkv_fusion(),
            samkv_guided(),
            auto(),
        )
    }
)
"""Name -> method, in the order of the tables in the docs."""

DEFAULT_METHOD = "auto"


def get_method(name: str | Method) -> Method:
    """The method called ``name``; a `Method` is returned as it is. Raises UnknownOption."""
    if isinstance(name, Method):
        return name
    if not isinstance(name, str) or name not in METHODS:
        raise UnknownOption.among("method", name, METHODS)
    return METHODS[name]

"""Runtimes run models: `base` is the seam, and each package here is a runtime."""

from __future__ import annotations

from collections.abc import Mapping

from samkv_integrations.errors import MissingExtra, UnknownOption
from samkv_integrations.methods.table import Table
from samkv_integrations.runtimes.base import RuntimeKind

RUNTIMES: Mapping[str, RuntimeKind] = Table[RuntimeKind](
    "runtime",
    RuntimeKind,
    {
        "transformers": "samkv_integrations.runtimes.transformers.kind:TRANSFORMERS",
        "llama_cpp": "samkv_integrations.runtimes.llama_cpp.kind:LLAMA_CPP",
    },
    group="samkv.runtimes",
)
"""Name -> runtime. Listing the names imports none of them.

Other distributions add runtimes by entry points of the group ``samkv.runtimes``.
"""


def require_runtime() -> None:
    """Raises MissingExtra unless a runtime is installed. Imports none: that takes seconds."""
    MissingExtra.unless_installed("transformers", "torch", "transformers")


def get_runtime(name: str) -> RuntimeKind:
    """The runtime called ``name``. Raises UnknownOption; its ``load`` raises MissingExtra."""
    if name not in RUNTIMES:
        raise UnknownOption.among("runtime", name, RUNTIMES)
    return RUNTIMES[name]

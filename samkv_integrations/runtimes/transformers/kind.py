"""The transformers runtime in the table of runtimes: it imports nothing heavy."""

from __future__ import annotations

from typing import Any

from samkv_integrations.runtimes import require_runtime
from samkv_integrations.runtimes.base import Runtime, RuntimeKind


def _load(name: str, **options: Any) -> Runtime:
    """See `load_model`. Raises MissingExtra without torch or transformers."""
    require_runtime()
    from samkv_integrations.runtimes.transformers.loading import load_model

    return load_model(name, **options)


TRANSFORMERS = RuntimeKind(name="transformers", load=_load)

"""What runs a model: one package a runtime."""

from __future__ import annotations

from samkv_integrations.errors import MissingExtra


def require_runtime() -> None:
    """Raises MissingExtra unless a runtime is installed; imports none, since that takes seconds."""
    MissingExtra.unless_installed("transformers", "torch", "transformers")

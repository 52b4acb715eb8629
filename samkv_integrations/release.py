"""The release of this package."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The release, ``"unknown"`` for a source tree that was never installed."""
    try:
        return metadata.version("samkv-integrations")
    except metadata.PackageNotFoundError:
        return "unknown"

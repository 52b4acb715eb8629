"""A model that workers can load, and a cluster of two processors."""

from __future__ import annotations

import pytest

from tests.support.models import saved_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model, one token a byte."""
    return saved_tiny(tmp_path_factory.mktemp("model") / "tiny")

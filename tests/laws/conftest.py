"""Engines that laws are held against."""

from __future__ import annotations

import pytest

from samkv_integrations.engine import Engine
from tests.support.laws import WITH_BITS, shared_engine
from tests.support.models import FAMILIES


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Of every family, with the entries that the model computed. Tests may cache more chunks."""
    return shared_engine(request.param, 16)


@pytest.fixture(params=WITH_BITS, ids=lambda p: f"{p[0]}-{p[1]}")
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Of every family, and with entries of few bits."""
    return shared_engine(*request.param)

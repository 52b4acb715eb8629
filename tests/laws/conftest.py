"""Engines that laws are held against."""

from __future__ import annotations

import pytest

from samkv_integrations.engine.engine import Engine
from tests.support.laws import engine_of
from tests.support.models import FAMILIES


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Of every family, with the entries that the model computed."""
    return engine_of(request.param, 16)


WITH_BITS = [*((family, 16) for family in FAMILIES), ("llama", 4), ("qwen3", 4), ("qwen2", 8)]


@pytest.fixture(params=WITH_BITS, ids=lambda p: f"{p[0]}-{p[1]}")
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Of every family, and with entries of few bits."""
    return engine_of(*request.param)

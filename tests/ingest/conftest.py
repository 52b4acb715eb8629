"""A model that workers can load, and a cluster of two processors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.models import saved_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray with two processors of this machine, for all tests: it takes seconds to start."""
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 * 2**20,
    )
    yield
    ray.shutdown()

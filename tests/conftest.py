"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.chroma_server import chroma_server
from tests.support.steps import Steps


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The tensors are tiny, and threads that wait for each other on a busy machine cost more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def chroma_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a Chroma server that the tests of a module share; each makes its own collections.

    Not those of others: `sync` asks all collections of a database what they reference.
    """
    with chroma_server(tmp_path_factory.mktemp("server") / "chroma") as port:
        yield port


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """The steps of answers after their first tokens."""
    counted = Steps(monkeypatch)
    yield counted
    counted.release()

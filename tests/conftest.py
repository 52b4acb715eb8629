"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from samkv_integrations.chroma.client import client_of_server
from samkv_integrations.errors import InvalidOption
from samkv_integrations.plan.request import Request
from samkv_integrations.runtimes.base import Observer
from samkv_integrations.serving import answers
from samkv_integrations.serving.first_token import FirstToken, first_token
from tests.support.chroma_server import HOST as CHROMA_HOST
from tests.support.chroma_server import chroma_server
from tests.support.live_server import LiveServer, live_server, serving_town
from tests.support.steps import Steps
from tests.support.telemetry import Told, listening
from tests.support.tested_runtime import ON_LLAMA_CPP


def pytest_collection_finish() -> None:
    """What has been imported stays: a collection of garbage need not look through it again."""
    gc.collect()
    gc.freeze()


@contextmanager
def _skipped_on_llama_cpp() -> Iterator[None]:
    """On llama.cpp, a method or an eviction that it does not run has no test."""
    try:
        yield
    except InvalidOption as error:
        if ON_LLAMA_CPP and "needs the transformers runtime" in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _skipped_on_llama_cpp():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _skipped_on_llama_cpp():
        yield


@pytest.fixture(autouse=True, scope="module")
def what_a_module_leaves_stays() -> Iterator[None]:
    """Models that it holds, and what it was the first to import, for the same reason.

    After some thousand tests each collection that a test asks for would take a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The tensors are tiny, and threads that wait for each other on a busy machine cost more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_settings_of_the_user() -> Iterator[None]:
    """A secret, a remote tier or keys that whoever runs the tests has set are not the tests'.

    Processes that tests start have one thread, too.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SAMKV_")}
    kept["OMP_NUM_THREADS"] = "1"
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """What `fsync` is for, a power cut, no test can make; a kill loses nothing without it.

    On a busy disk each file that is written would cost some tens of milliseconds.
    """
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        yield


@pytest.fixture(scope="session")
def chroma_server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a Chroma server, which takes seconds to start."""
    with chroma_server(tmp_path_factory.mktemp("server") / "chroma") as port:
        yield port


@pytest.fixture(scope="module")
def chroma_port(chroma_server_of_all: int) -> Iterator[int]:
    """Port of a Chroma server that the tests of a module share; each makes its own collections.

    They are deleted: `sync` asks all collections of a database what they reference.
    """
    yield chroma_server_of_all
    client = client_of_server(CHROMA_HOST, chroma_server_of_all)
    for collection in client.list_collections():
        client.delete_collection(collection.name)


@pytest.fixture
def databases_of_its_own() -> Iterator[None]:
    """Chroma remembers the folders that a process has opened by the paths it was given.

    After a change of directory ``chroma`` would mean the database of another test still.
    """
    from chromadb.api.shared_system_client import SharedSystemClient

    known = SharedSystemClient._identifier_to_system, SharedSystemClient._identifier_to_refcount
    with ExitStack() as stack:
        for each in known:
            stack.enter_context(mock.patch.dict(each, clear=True))
        yield
        gc.collect()  # clients say that they go


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """The steps of answers after their first tokens."""
    counted = Steps(monkeypatch)
    yield counted
    counted.release()


@pytest.fixture
def told() -> Iterator[Told]:
    """What OpenTelemetry is told."""
    with listening() as told:
        yield told


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests whose first pass has begun."""
    found: list[Request] = []

    def noted(request: Request, observer: Observer) -> FirstToken:
        found.append(request)
        return first_token(request, observer)

    monkeypatch.setattr(answers, "first_token", noted)
    return found


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that all tests share: none of them changes what it holds."""
    with live_server(tmp_path_factory.mktemp("live")) as server:
        yield server


@pytest.fixture(scope="session")
def town_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the sample documents are served, as by the README's ``samkv serve``."""
    with serving_town(tmp_path_factory.mktemp("town")) as address:
        yield address

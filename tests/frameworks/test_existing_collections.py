"""Both vector stores on a collection that is filled already: a warning, or its caches at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_samkv import SamKVChroma
from llama_index.vector_stores.samkv import SamKVChromaVectorStore
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from tests.support.chroma_link import add_raw, client_of
from tests.support.records import TEXTS, builtin

LOGGER = "samkv_integrations.chroma.link"
Store = SamKVChroma | SamKVChromaVectorStore
Opened = Callable[..., Store]


def langchain(collection: Any, engine: Engine, **options: Any) -> Store:
    folder = client_of(collection).get_settings().persist_directory
    return SamKVChroma(collection.name, persist_directory=folder, engine=engine, **options)


def llama_index(collection: Any, engine: Engine, **options: Any) -> Store:
    return SamKVChromaVectorStore(collection, engine=engine, **options)


def llama_index_from_params(collection: Any, engine: Engine, **options: Any) -> Store:
    folder = client_of(collection).get_settings().persist_directory
    return SamKVChromaVectorStore.from_params(
        collection.name, persist_dir=folder, engine=engine, **options
    )


@pytest.fixture(params=[langchain, llama_index, llama_index_from_params])
def opened(request: pytest.FixtureRequest) -> Opened:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(builtin(), ChunkStore(tmp_path / "kv"), block_size=8)


@pytest.fixture
def filled(tmp_path: Path, engine: Engine) -> Any:
    """A collection as another vector store has left it."""
    collection = open_collection(tmp_path / "chroma", "town", create=True)
    link = ChromaLink(collection, engine)
    add_raw(link, dict(zip("abcdef", TEXTS, strict=True)), source="x")
    return collection


def test_the_next_step_is_in_the_log(
    filled: Any, engine: Engine, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        opened(filled, engine)
    (record,) = (each for each in caplog.records if each.name == LOGGER)
    for part in (
        "records of collection 'town'",
        "cache_existing=True",
        "kv_link.sync()",
        "store sync",
    ):
        assert part in record.getMessage()
    assert not engine.store.keys()


def test_all_of_it_is_cached_in_one_go(
    filled: Any,
    engine: Engine,
    opened: Opened,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (other,) = engine.cache_chunks(
        ["A chunk that no record references, and that is long enough to be found."]
    )
    with caplog.at_level(logging.WARNING, LOGGER):
        store = opened(filled, engine, cache_existing=True)
        opened(filled, engine)  # from now on there is nothing to warn of
    assert not caplog.records
    assert "syncing town" in capsys.readouterr().err
    assert set(engine.store.keys()) == {other, *map(engine.key_of, TEXTS)}
    assert engine.found_in("\n\n".join(TEXTS)) == TEXTS
    assert store.kv_link.sync().n_cached == 0

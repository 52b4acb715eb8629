"""LangChain's own suites: the vector store, its retriever, and the embedding, none overridden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStoreRetriever
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from langchain_samkv import OfflineEmbeddings, SamKVChroma
from samkv_integrations import ChunkStore, Engine, MemoryStore
from tests.support.chroma_link import assert_in_step, files, records
from tests.support.langchain_store import Letters
from tests.support.models import tiny_model
from tests.support.records import TEXTS


def assert_forgotten(name: str) -> None:
    """A database in memory is shared by the process: nothing of it may reach another test."""
    client: Any = chromadb.Client(chromadb.Settings(anonymized_telemetry=False))
    assert name not in {each.name for each in client.list_collections()}


class TestVectorStore(VectorStoreIntegrationTests):
    """Records and files are in step whatever the suite did."""

    @pytest.fixture(params=["memory", "folder"])
    def vectorstore(  # type: ignore[override]
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[SamKVChroma]:
        store = SamKVChroma(
            "standard",
            self.get_embeddings(),
            persist_directory=str(tmp_path / "chroma") if request.param == "folder" else None,
            engine=Engine(tiny_model("llama"), ChunkStore(tmp_path / "kv"), block_size=8),
        )
        yield store
        assert_in_step(store, *(text or "" for text, _ in records(store).values()))
        store.reset_collection()
        assert not files(store)
        store.delete_collection()
        assert_forgotten("standard")


class TestRetriever(RetrieversIntegrationTests):
    """The suite makes retrievers of a class; ours come from `as_retriever`."""

    @pytest.fixture(autouse=True)
    def store(self) -> Iterator[None]:
        self._store = SamKVChroma(
            "retrieved", Letters(), engine=Engine(tiny_model("llama"), MemoryStore(), block_size=8)
        )
        self._store.add_texts(TEXTS)
        yield
        self._store.delete_collection()
        assert_forgotten("retrieved")

    @property
    def retriever_constructor(self) -> Callable[..., VectorStoreRetriever]:  # type: ignore[override]
        return lambda **search: self._store.as_retriever(search_kwargs=search)

    @property
    def retriever_query_example(self) -> str:
        return TEXTS[0]


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OfflineEmbeddings


class TestEmbeddingsIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OfflineEmbeddings

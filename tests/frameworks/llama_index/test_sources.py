"""What users see of nodes: their own metadata, and no key of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from llama_index.vector_stores.samkv import SamKVChromaVectorStore
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import KEY_FIELD
from tests.support.chroma_link import add_raw
from tests.support.llama_index_corpus import Lexical
from tests.support.records import RECORDS, TEXTS, builtin

pytest_plugins = ["tests.support.llama_index_fixtures"]
pytestmark = pytest.mark.usefixtures("no_other_model")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(builtin(), ChunkStore(tmp_path / "kv"))


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> SamKVChromaVectorStore:
    return SamKVChromaVectorStore.from_params(
        "town", persist_dir=tmp_path / "chroma", engine=engine
    )


def index_of(
    engine: Engine, store: SamKVChromaVectorStore | None, transform: SamKVCacheTransform | None
) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        [Document(text=text, metadata={"page": place}) for place, text in enumerate(TEXTS)],
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SentenceSplitter(chunk_size=256), *([transform] if transform else [])],
        embed_model=Lexical(),
    )


@pytest.mark.parametrize("mode", ["text", "handle"])
@pytest.mark.parametrize("kind", ["ours", "ours, with the transform", "stock"])
def test_sources_hold_no_key(
    engine: Engine, store: SamKVChromaVectorStore, kind: str, mode: Any
) -> None:
    transform = None if kind == "ours" else SamKVCacheTransform(engine=engine)
    index = index_of(engine, None if kind == "stock" else store, transform)
    llm = SamKVLLM(engine=engine, max_new_tokens=8)
    response = index.as_query_engine(
        llm=llm, node_postprocessors=[SamKVPostprocessor(llm=llm, mode=mode)]
    ).query(RECORDS[0].question)
    assert llm.last_report is not None and llm.last_report.found == 2
    nodes = [found.node for found in response.source_nodes]
    shown = json.dumps([response.metadata, [node.metadata for node in nodes]])
    assert KEY_FIELD not in shown and set(nodes[0].metadata) == {"page"}
    assert KEY_FIELD not in json.dumps([node.to_dict() for node in nodes])


def test_nodes_of_other_programs(engine: Engine, store: SamKVChromaVectorStore) -> None:
    """Both have the key in the metadata that become those of the node."""
    old = TextNode(
        id_="old", text=TEXTS[0], embedding=[1.0, 0.0], metadata={KEY_FIELD: "0" * 32, "page": 1}
    )
    store.add([old])
    add_raw(store.kv_link, {"raw": TEXTS[1]}, **{KEY_FIELD: engine.key_of(TEXTS[1])})
    found = store.query(VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=2)).nodes
    assert found is not None and len(found) == 2
    for node in (*found, *store.get_nodes()):
        assert KEY_FIELD not in json.dumps(node.to_dict())
    rows = store.client.get(include=["metadatas"])["metadatas"]
    assert {row[KEY_FIELD] for row in rows} == set(map(engine.key_of, TEXTS[:2]))


def test_another_store_with_a_cache_that_is_gone_is_computed(
    engine: Engine, store: SamKVChromaVectorStore
) -> None:
    nodes = [TextNode(text=TEXTS[0], embedding=[1.0, 0.0])]
    SamKVCacheTransform(engine=engine)(nodes)
    engine.store.delete(engine.key_of(TEXTS[0]))
    store.add(nodes)
    assert engine.is_cached(TEXTS[0])

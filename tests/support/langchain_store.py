"""What the tests of LangChain's vector store share."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_samkv import SamKVChroma
from samkv_integrations import ChunkStore
from samkv_integrations.chroma.records import KEY_FIELD

VECTOR = [1.0, 0.0, 0.0, 0.0]


class Letters(Embeddings):
    """Four numbers a text, for tests in which it does not matter what is near."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[1.0, *(float(text.count(letter)) for letter in "aei")] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def client_of(store: SamKVChroma) -> Any:
    """Chroma's client, to which LangChain's store has no public way."""
    return store._client


def files(store: SamKVChroma) -> set[str]:
    """Names of the files of caches, whatever the store says about them."""
    kv = store.kv_link.engine.store
    assert isinstance(kv, ChunkStore)
    return {file.stem for file in kv.path.glob("*/*/*.safetensors")}


def keys_of(store: SamKVChroma, *texts: str) -> set[str]:
    return {store.kv_link.engine.key_of(text) for text in texts}


def records(store: SamKVChroma) -> dict[str, tuple[str | None, str | None]]:
    """id -> (document, key), as Chroma has them."""
    rows = store.kv_link.collection.get(include=["documents", "metadatas"])
    return {
        id_: (text, (row or {}).get(KEY_FIELD))
        for id_, text, row in zip(rows["ids"], rows["documents"], rows["metadatas"], strict=True)
    }


def assert_in_step(store: SamKVChroma, *texts: str) -> None:
    """The collection holds exactly these texts, and the folder exactly their caches."""
    held = records(store)
    assert sorted(text or "" for text, _ in held.values()) == sorted(texts)
    key_of = store.kv_link.engine.key_of
    assert all(key == key_of(text or "") for text, key in held.values())
    assert files(store) == keys_of(store, *texts)

"""A collection linked with a folder of caches, and what is in both.

store: a vector store of LangChain or LlamaIndex.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import KEY_FIELD, open_collection
from samkv_integrations.chroma.link import ChromaLink
from tests.support.records import builtin

VECTOR = [1.0, 0.0]
IDS = ["a", "b", "c", "d", "e", "f"]


def link_of(folder: Path, name: str = "town", *, namespace: str = "", size: int = 8) -> ChromaLink:
    store = ChunkStore(folder / "kv", namespace=namespace)
    collection = open_collection(folder / "chroma", name, create=True)
    return ChromaLink(collection, Engine(builtin(), store, block_size=size))


def add_raw(link: ChromaLink, texts: dict[str, str | None], **metadata: Any) -> None:
    for id_, text in texts.items():
        link.collection.add(
            ids=[id_],
            documents=None if text is None else [text],
            embeddings=[VECTOR],
            metadatas=[metadata] if metadata else None,
        )


def client_of(collection: Any) -> Any:
    """The client behind a collection, to which Chroma has no public way."""
    return collection._client


def any_bytes_of(link: ChromaLink, text: str) -> list[str]:
    """Files of the store that hold the text, or a good part of it."""
    assert isinstance(link.engine.store, ChunkStore)
    part = text.encode()[len(text) // 4 : len(text) // 2]
    assert len(part) > 8
    files = [file for file in link.engine.store.path.rglob("*") if file.is_file()]
    return [str(file) for file in files if part in file.read_bytes()]


def files(store: Any) -> set[str]:
    """Names of the files of caches, whatever the store says about them."""
    kv = store.kv_link.engine.store
    assert isinstance(kv, ChunkStore)
    return {file.stem for file in kv.path.glob("*/*/*.safetensors")}


def keys_of(store: Any, *texts: str) -> set[str]:
    return {store.kv_link.engine.key_of(text) for text in texts}


def records(store: Any) -> dict[str, tuple[str | None, str | None]]:
    """id -> (document, key), as Chroma has them."""
    rows = store.kv_link.collection.get(include=["documents", "metadatas"])
    return {
        id_: (text, (row or {}).get(KEY_FIELD))
        for id_, text, row in zip(rows["ids"], rows["documents"], rows["metadatas"], strict=True)
    }


def assert_in_step(store: Any, *texts: str) -> None:
    """The collection holds exactly these texts, and the folder exactly their caches."""
    held = records(store)
    assert sorted(text or "" for text, _ in held.values()) == sorted(texts)
    key_of = store.kv_link.engine.key_of
    assert all(key == key_of(text or "") for text, key in held.values())
    assert files(store) == keys_of(store, *texts)

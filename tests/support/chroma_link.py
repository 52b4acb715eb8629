"""A collection linked with a folder of caches, and records that somebody else writes into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from tests.support.records import builtin

VECTOR = [1.0, 0.0]
IDS = ["a", "b", "c", "d", "e", "f"]


def link_of(folder: Path, name: str = "town", *, namespace: str = "", size: int = 8) -> ChromaLink:
    store = ChunkStore(folder / "kv", namespace=namespace)
    collection = open_collection(folder / "chroma", name, create=True)
    return ChromaLink(collection, Engine(builtin(), store, block_size=size))


def add_raw(link: ChromaLink, texts: dict[str, str | None], **metadata: Any) -> None:
    """Records as another program writes them."""
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

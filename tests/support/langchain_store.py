"""What the tests of LangChain's vector store share."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_samkv import SamKVChroma

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

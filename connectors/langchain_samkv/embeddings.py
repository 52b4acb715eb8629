"""An embedding that needs no model."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from samkv_integrations.embedding import HashingEmbedding


class OfflineEmbeddings(Embeddings):
    """`HashingEmbedding` as LangChain wants it: lexical, without a model to download.

    The vectors are those that ``samkv ingest`` and the LlamaIndex quickstart write.

    Instantiate:
        ```python
        from langchain_samkv import OfflineEmbeddings

        embeddings = OfflineEmbeddings()
        ```

    Use:
        ```python
        vector = embeddings.embed_query("Where was Tobias Trulman born?")
        vectors = embeddings.embed_documents(["Tobias Trulman was born in Flevport."])
        likeness = sum(a * b for a, b in zip(vector, vectors[0]))
        ```

    Async:
        ```python
        vector = await embeddings.aembed_query("Where was Tobias Trulman born?")
        ```
    """

    def __init__(self) -> None:
        self._embedding = HashingEmbedding()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for a text without words."""
        return self._embedding.embed(texts)

    def embed_query(self, text: str) -> list[float]:
        """The vector that a document of this text has."""
        return self.embed_documents([text])[0]

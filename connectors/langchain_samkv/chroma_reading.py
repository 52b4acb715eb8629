"""Reading a Chroma collection: documents without keys, and what Chroma refuses as our errors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_chroma import Chroma
from langchain_core.documents import Document

from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.results import KEY_FIELD
from samkv_integrations.errors import InvalidOption

if TYPE_CHECKING:
    from chromadb import Search, WhereDocument

DEFAULT_K = 4
Where = dict[str, Any]


class KeylessChroma(Chroma):
    """A `Chroma` whose documents come out without the keys of their caches.

    No prompt that shows metadata shows a key then; `get` gives records as they are stored.
    """

    def get(
        self,
        ids: str | list[str] | None = None,
        where: Where | None = None,
        limit: int | None = None,
        offset: int | None = None,
        where_document: WhereDocument | None = None,
        include: list[str] | None = None,
    ) -> dict[str, Any]:
        """Records as they are stored; see `Chroma`. Raises InvalidOption if Chroma refuses."""
        with chroma_errors(f"collection {self._collection_name!r} refused to be read"):
            return super().get(ids, where, limit, offset, where_document, include)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids that there are, in whatever order."""
        found = self._records(ids)
        columns = found["documents"], found["metadatas"], found["ids"]
        return [
            _without_key(Document(page_content=text, metadata=metadata or {}, id=id_))
            for text, metadata, id_ in zip(*columns, strict=True)
            if text is not None
        ]

    def _records(self, ids: Sequence[str]) -> dict[str, Any]:
        if not ids:  # Chroma does not take that
            return {"ids": [], "documents": [], "metadatas": []}
        return self.get(ids=list(dict.fromkeys(ids)))  # nor does it take one twice

    def similarity_search_by_vector_with_relevance_scores(
        self,
        embedding: list[float],
        k: int = DEFAULT_K,
        filter: Where | None = None,
        where_document: Where | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[tuple[Document, float]]:
        """The documents nearest to ``embedding`` and their distances; see `Chroma`.

        Raises InvalidOption if Chroma refuses, such as an embedding of another size.
        """
        with self._query():
            found = super().similarity_search_by_vector_with_relevance_scores(
                embedding, k, filter, where_document, **kwargs
            )
        return [(_without_key(document), distance) for document, distance in found]

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int = DEFAULT_K,
        filter: Where | None = None,
        where_document: Where | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Document]:
        """The documents nearest to ``embedding``; see `Chroma`."""
        found = self.similarity_search_by_vector_with_relevance_scores(
            embedding, k, filter, where_document, **kwargs
        )
        return [document for document, _ in found]

    def similarity_search_with_score(
        self,
        query: str,
        k: int = DEFAULT_K,
        filter: Where | None = None,
        where_document: Where | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[tuple[Document, float]]:
        """The documents nearest to ``query`` and their distances; see `Chroma`."""
        return self.similarity_search_by_vector_with_relevance_scores(
            self._embed(query), k, filter, where_document, **kwargs
        )

    def similarity_search_with_vectors(
        self,
        query: str,
        k: int = DEFAULT_K,
        filter: Where | None = None,
        where_document: Where | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[tuple[Document, np.ndarray[Any, Any]]]:
        """The documents nearest to ``query`` and their embeddings; see `Chroma`."""
        if self._embedding_function is None:
            raise no_embedding("searching by text")
        with self._query():
            found = super().similarity_search_with_vectors(
                query, k, filter, where_document, **kwargs
            )
        return [(_without_key(document), vector) for document, vector in found]

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = DEFAULT_K,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Where | None = None,
        where_document: Where | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Document]:
        """Documents near to ``embedding`` and unlike each other; see `Chroma`."""
        with self._query():
            found = super().max_marginal_relevance_search_by_vector(
                embedding, k, fetch_k, lambda_mult, filter, where_document, **kwargs
            )
        return [_without_key(document) for document in found]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = DEFAULT_K,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Where | None = None,
        where_document: Where | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Document]:
        """Documents near to ``query`` and unlike each other; see `Chroma`."""
        return self.max_marginal_relevance_search_by_vector(
            self._embed(query), k, fetch_k, lambda_mult, filter, where_document, **kwargs
        )

    def hybrid_search(self, search: Search) -> list[Document]:
        """Documents that ``search`` finds; Chroma Cloud alone can do it."""
        with self._query():
            return [_without_key(document) for document in super().hybrid_search(search)]

    def _embed(self, query: str) -> list[float]:
        if self._embedding_function is None:
            raise no_embedding("searching by text")
        return self._embedding_function.embed_query(query)

    def _query(self) -> AbstractContextManager[None]:
        return chroma_errors(f"collection {self._collection_name!r} refused the query")


def no_embedding(what: str) -> InvalidOption:
    """The error for what needs an embedding function and has none."""
    return InvalidOption(f"{what} without an embedding_function; give one to the constructor")


def _without_key(document: Document) -> Document:
    """Takes the key out of a document that was made a moment ago."""
    document.metadata.pop(KEY_FIELD, None)
    return document

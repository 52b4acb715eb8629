"""An embedding to try things with, which needs no model."""

from __future__ import annotations

from llama_index.core.embeddings import BaseEmbedding

from samkv_integrations.chroma import HashingEmbedding


class OfflineEmbedding(BaseEmbedding):
    """`HashingEmbedding` for LlamaIndex: lexical, with no model to download."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return HashingEmbedding().embed([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

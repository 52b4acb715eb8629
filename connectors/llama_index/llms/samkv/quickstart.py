"""The quickstart: an engine, a folder of documents, Chroma, and a query engine.

It is ordinary LlamaIndex code, in which only `SamKVLLM`, `SamKVChromaVectorStore` and
`SamKVPostprocessor` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter

from llama_index.llms.samkv.base import SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from llama_index.vector_stores.samkv import SamKVChromaVectorStore
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.embedding import HashingEmbedding
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.report import Report
from samkv_integrations.errors import EmptyInput
from samkv_integrations.formatting import count


class OfflineEmbedding(BaseEmbedding):
    """`HashingEmbedding` for LlamaIndex: lexical, with no model to download."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return HashingEmbedding().embed([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer and its report. sources, chunks: documents and texts of its chunks, nearest first.

    seconds: time of the whole answer, after retrieval.
    """

    text: str
    sources: tuple[str, ...]
    chunks: tuple[str, ...]
    report: Report

    @property
    def seconds(self) -> float:
        steps, per_s = self.report.completion_tokens - 1, self.report.decode_tokens_per_s
        return self.report.ttft_s + (steps / per_s if per_s else 0.0)


class Quickstart:
    """An index of a few documents, and answers from it by any method.

    Args:
        engine: keeps the chunk caches.
        folder: holds the Chroma database.
        chunk_tokens: most tokens of a chunk. top_k: chunks to retrieve for a question.
        max_new_tokens: most tokens of an answer.
    """

    def __init__(
        self, engine: Engine, folder: Path, *, chunk_tokens: int, top_k: int, max_new_tokens: int
    ) -> None:
        self._engine, self._top_k, self._max_new_tokens = engine, top_k, max_new_tokens
        self._chunk_tokens = chunk_tokens
        self._collection = open_collection(folder / "chroma", "documents", create=True)
        self._index: VectorStoreIndex | None = None

    def ingest(self, texts: Mapping[str, str]) -> tuple[int, int]:
        """Replace the documents of the collection, and cache their chunks.

        texts: name -> text. Returns the number of chunks, and how many of them had no cache before.

        Raises EmptyInput if all texts are empty.
        """
        documents = [
            Document(
                text=text, metadata={"source": name},
                # neither prompts nor embeddings hold its name
                excluded_llm_metadata_keys=["source"], excluded_embed_metadata_keys=["source"],
            )
            for name, text in texts.items()
            if normalise(text)
        ]  # fmt: skip
        if not documents:
            raise EmptyInput(f"no text in {count(len(texts), 'document')}; give some with text")
        of_earlier_runs = self._collection.get(include=[])["ids"]
        cached_before = set(self._engine.store.keys())
        vector_store = SamKVChromaVectorStore(self._collection, engine=self._engine)
        self._index = VectorStoreIndex.from_documents(
            documents,
            transformations=[SentenceSplitter(chunk_size=self._chunk_tokens, chunk_overlap=0)],
            storage_context=StorageContext.from_defaults(vector_store=vector_store),
            embed_model=OfflineEmbedding(),
        )
        n_cached = len(set(self._engine.store.keys()) - cached_before)
        if of_earlier_runs:  # only now, so that caches of unchanged texts stay
            vector_store.delete_nodes(of_earlier_runs)
        return self._collection.count(), n_cached

    def ask(self, engine: Engine, question: str, method: str) -> Reply:
        """The answer of a query engine over the index. Call `ingest` first.

        engine: answers, over the store of the ingest.
        """
        assert self._index is not None, "nothing was ingested"
        engine.prefixes.clear()  # so that no method reuses the prefix of another
        llm = SamKVLLM(engine=engine, method=method, max_new_tokens=self._max_new_tokens)
        query_engine = self._index.as_query_engine(
            llm=llm,
            similarity_top_k=self._top_k,
            node_postprocessors=[SamKVPostprocessor(llm=llm)],
        )
        response = query_engine.query(question)
        report = llm.last_report
        assert report is not None
        nodes = [found.node for found in response.source_nodes]
        return Reply(
            text=str(response).strip(), sources=tuple(node.metadata["source"] for node in nodes),
            chunks=tuple(node.get_content() for node in nodes), report=report,
        )  # fmt: skip

"""The quickstart: an engine, a folder of documents, Chroma, and a query engine.

It is ordinary LlamaIndex code, in which only `SamKVLLM`, `SamKVChromaVectorStore` and
`SamKVPostprocessor` are ours.
"""

from __future__ import annotations

import time
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
from samkv_integrations.chroma.records import IngestResult
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
        engine: answers, and keeps the chunk caches.
        folder: holds the Chroma database.
        chunk_tokens: most tokens of a chunk. top_k: chunks to retrieve for a question.
        max_new_tokens: most tokens of an answer.
    """

    def __init__(
        self, engine: Engine, folder: Path, *, chunk_tokens: int, top_k: int, max_new_tokens: int
    ) -> None:
        self.engine, self._top_k, self._max_new_tokens = engine, top_k, max_new_tokens
        self._chunk_tokens = chunk_tokens
        self._collection = open_collection(folder / "chroma", "documents", create=True)
        self._embedding = OfflineEmbedding()
        self._index: VectorStoreIndex | None = None

    def ingest(self, texts: Mapping[str, str]) -> IngestResult:
        """Replace the documents of the collection, and cache their chunks.

        texts: name -> text. Raises EmptyInput if all of them are empty.
        """
        began = time.perf_counter()
        store = self.engine.store
        keys, n_bytes = set(store.keys()), store.stats().bytes
        documents = [
            Document(text=text, metadata={"source": name})
            for name, text in texts.items()
            if normalise(text)
        ]
        if not documents:
            raise EmptyInput(f"no text in {count(len(texts), 'document')}; give some with text")
        for document in documents:  # neither prompts nor embeddings hold its name
            document.excluded_llm_metadata_keys = ["source"]
            document.excluded_embed_metadata_keys = ["source"]
        of_earlier_runs = self._collection.get(include=[])["ids"]
        vector_store = SamKVChromaVectorStore(self._collection, engine=self.engine)
        self._index = VectorStoreIndex.from_documents(
            documents,
            transformations=[SentenceSplitter(chunk_size=self._chunk_tokens, chunk_overlap=0)],
            storage_context=StorageContext.from_defaults(vector_store=vector_store),
            embed_model=self._embedding,
        )
        n_cached, n_bytes = len(set(store.keys()) - keys), store.stats().bytes - n_bytes
        if of_earlier_runs:  # only now, so that caches of unchanged texts stay
            vector_store.delete_nodes(of_earlier_runs)
        n_records = self._collection.count()
        return IngestResult(
            n_records=n_records,
            n_cached=n_cached,
            n_hit=n_records - n_cached,
            seconds=time.perf_counter() - began,
            bytes_on_disk=n_bytes,
        )

    def ask(self, question: str, method: str) -> Reply:
        """The answer of a query engine over the index. Call `ingest` first."""
        assert self._index is not None, "nothing was ingested"
        self.engine.prefixes.clear()  # so that no method reuses the prefix of another
        llm = SamKVLLM(engine=self.engine, method=method, max_new_tokens=self._max_new_tokens)
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

"""The records in a LlamaIndex index, and prompts that hold their handles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_index.core import Document, PromptTemplate, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.node_parser import SentenceSplitter
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.embedding import HashingEmbedding
from tests.support.records import (
    CHAT_TEMPLATE,
    COMPLETION_TEMPLATE,
    RECORDS,
    TEXTS,
    Record,
    builtin,
)

TOP_K = 4
ASKED = RECORDS[2]


class Lexical(BaseEmbedding):
    """The offline embedding as LlamaIndex wants one."""

    _hashing: HashingEmbedding = PrivateAttr(default_factory=HashingEmbedding)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._hashing.embed([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    folder: Path
    engine: Engine
    index: VectorStoreIndex
    collection: Any

    def llm(self, **options: Any) -> SamKVLLM:
        return SamKVLLM(engine=self.engine, max_new_tokens=12, **options)

    def query_engine(
        self, llm: SamKVLLM, *, postprocessor: SamKVPostprocessor | None = None, **options: Any
    ) -> Any:
        template = CHAT_TEMPLATE if llm.is_chat_model else COMPLETION_TEMPLATE
        return self.index.as_query_engine(
            llm=llm,
            similarity_top_k=TOP_K,
            node_postprocessors=[postprocessor or SamKVPostprocessor(llm=llm, mode="handle")],
            text_qa_template=PromptTemplate(template),
            **options,
        )

    def key_file(self, text: str) -> Path:
        (file,) = self.folder.glob(f"kv/*/*/{self.engine.key_of(text)}.safetensors")
        return file


def ingest(folder: Path) -> Corpus:
    """The records as a user would ingest them; ``folder`` may hold them already."""
    engine = Engine(builtin(), ChunkStore(folder / "kv"))
    collection = open_collection(folder / "chroma", "town", create=True)
    store = ChromaVectorStore(chroma_collection=collection)
    documents = [
        Document(text=record.text, doc_id=record.name, metadata={"file": f"{place}.txt"})
        for place, record in enumerate(RECORDS)
    ]
    for document in documents:
        document.excluded_embed_metadata_keys.append("file")
    index = VectorStoreIndex.from_documents(
        documents,
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SentenceSplitter(chunk_size=256), SamKVCacheTransform(engine=engine)],
        embed_model=Lexical(),
    )
    return Corpus(folder=folder, engine=engine, index=index, collection=collection)


def cached_prompt(corpus: Corpus, template: str = CHAT_TEMPLATE, record: Record = ASKED) -> str:
    """The handles of all records, and the question about one of them."""
    handles = [corpus.engine.issue_handle(text) for text in TEXTS]
    return template.format(context_str="\n\n".join(handles), query_str=record.question)

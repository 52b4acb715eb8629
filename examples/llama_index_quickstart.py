"""A LlamaIndex pipeline that reads its documents once: ingest, ask, chat, change a document.

    python examples/llama_index_quickstart.py

It runs offline, on the built-in model and the sample documents. For your own, change the four lines
under "yours to change".
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from llama_index.core import Document, SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore

from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.llms.samkv.quickstart import OfflineEmbedding
from llama_index.postprocessor.samkv import SamKVPostprocessor
from llama_index.vector_stores.samkv import SamKVChromaVectorStore

# Yours to change: a model (a hub id or a folder), an embedding, documents, and a folder for caches
# and records.
MODEL = "builtin"
EMBEDDING = OfflineEmbedding()
DOCUMENTS = Path(__file__).parent / "town_records"
FOLDER = Path(tempfile.mkdtemp(prefix="samkv-"))


def main() -> None:
    llm = SamKVLLM(model_name=MODEL, kv_dir=FOLDER / "kv", max_new_tokens=32)
    vector_store = SamKVChromaVectorStore.from_params(
        collection_name="town", persist_dir=FOLDER / "chroma", llm=llm
    )

    # Ingest: split, compute every chunk once and store its KV cache, embed, store.
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=512), SamKVCacheTransform(llm=llm), EMBEDDING],
        vector_store=vector_store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    pipeline.run(documents=read_documents())
    print(f"{len(llm.engine.store.keys())} chunks cached in {FOLDER / 'kv'}")

    # Ask: an ordinary query engine with this LLM and this postprocessor.
    index = VectorStoreIndex.from_vector_store(vector_store, embed_model=EMBEDDING)
    postprocessors = [SamKVPostprocessor(llm=llm)]
    query_engine = index.as_query_engine(
        llm=llm, similarity_top_k=4, node_postprocessors=postprocessors
    )
    question = "Where was Ingrid Delumb born?"
    response = query_engine.query(question)
    report = llm.last_report
    assert report is not None
    print(f"\n{question} {response}")
    print(f"  from {response.source_nodes[0].node.metadata['file_name']} and three others")
    print(
        f"  {report.found} chunks found, {report.reused} reused, {report.kept_ratio:.0%} attended"
    )

    # Stream: the same answer, piece by piece.
    print(f"\n{question} ", end="")
    streaming = index.as_query_engine(
        llm=llm, similarity_top_k=4, node_postprocessors=postprocessors, streaming=True
    )
    streamed = streaming.query(question)
    assert isinstance(streamed, StreamingResponse)
    streamed.print_response_stream()

    # Chat: every turn retrieves for itself.
    chat = index.as_chat_engine(
        chat_mode=ChatMode.CONTEXT,
        llm=llm,
        similarity_top_k=4,
        node_postprocessors=postprocessors,
    )
    for turn in ("Who does Thea Nilman work for?", "Where was Ingrid Delumb born?"):
        print(f"\n\n{turn} {chat.chat(turn)}", end="")

    # Change a document: the cache of the old chunk is deleted, the new text is computed once.
    changed = read_documents()
    for document in changed:
        if "Ingrid Delumb" in document.text.partition("\n")[0]:
            text = document.text.replace("Trulhaven", "Borminster")
            document.set_content(text)
    pipeline.run(documents=changed)
    print(f"\n\n{question} {query_engine.query(question)}")
    print(f"{len(llm.engine.store.keys())} chunks cached in {FOLDER / 'kv'}")


def read_documents() -> list[Document]:
    """The sample documents; a changed file replaces the old one, because its name is the id."""
    reader = SimpleDirectoryReader(DOCUMENTS, required_exts=[".txt"], filename_as_id=True)
    return list(reader.load_data())


if __name__ == "__main__":
    main()

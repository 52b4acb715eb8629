"""A LangChain chain that reads its documents once: index, ask, stream, chat, change a document.

    python examples/langchain_quickstart.py

It runs offline, on the built-in model and the sample documents. For your own, change the four lines
under "yours to change".
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnablePassthrough

from langchain_samkv import ChatSamKV, OfflineEmbeddings, SamKVChroma, format_docs

# Yours to change: a model (a hub id or a folder), embeddings, documents, and a folder for caches
# and records.
MODEL = "builtin"
EMBEDDINGS = OfflineEmbeddings()
DOCUMENTS = Path(__file__).parent / "town_records"
FOLDER = Path(tempfile.mkdtemp(prefix="samkv-"))

QUESTION = "Where was Ingrid Delumb born?"


def main() -> None:
    llm = ChatSamKV(model=MODEL, kv_dir=FOLDER / "kv", max_tokens=32)

    # Index: the model computes every document once, and its KV cache is stored.
    store = SamKVChroma("town", EMBEDDINGS, persist_directory=str(FOLDER / "chroma"), llm=llm)
    manager = InMemoryRecordManager(namespace="town")
    manager.create_schema()
    documents = read_documents()
    keep_up_to_date(documents, manager, store)
    print(f"{len(llm.engine.store.keys())} chunks cached in {FOLDER / 'kv'}")

    # Ask: an ordinary chain with this chat model.
    retriever = store.as_retriever(search_kwargs={"k": 4})
    prompt = ChatPromptTemplate.from_template("Documents:\n\n{context}\n\nQuestion: {question}")
    inputs = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    chain = inputs | prompt | llm | StrOutputParser()
    print(f"\n{QUESTION} {chain.invoke(QUESTION)}")
    report = llm.last_report
    assert report is not None
    print(
        f"  {report.found} chunks found, {report.reused} reused, {report.kept_ratio:.0%} attended"
    )

    # Stream: the same answer, piece by piece.
    print(f"\n{QUESTION} ", end="")
    for piece in chain.stream(QUESTION):
        print(piece, end="", flush=True)

    # Chat: every turn retrieves for itself.
    chat = ChatPromptTemplate.from_messages(
        [
            MessagesPlaceholder("history"),
            ("human", "Documents:\n\n{context}\n\nQuestion: {question}"),
        ]
    )
    history: list[HumanMessage | AIMessage] = []
    for turn in ("Who does Thea Nilman work for?", QUESTION):
        context = format_docs(retriever.invoke(turn))
        answer = (chat | llm).invoke({"history": history, "context": context, "question": turn})
        print(f"\n\n{turn} {answer.text}", end="")
        history += [HumanMessage(turn), AIMessage(answer.text)]

    # Change a document: the cache of the old text is deleted, the new text is computed once.
    for document in documents:
        if document.page_content.startswith("[Ingrid Delumb]"):
            document.page_content = document.page_content.replace("Trulhaven", "Borminster")
    keep_up_to_date(documents, manager, store)
    print(f"\n\n{QUESTION} {chain.invoke(QUESTION)}")
    print(f"{len(llm.engine.store.keys())} chunks cached in {FOLDER / 'kv'}")


def read_documents() -> list[Document]:
    """The sample documents, each with the name of its file."""
    return [
        Document(page_content=file.read_text(encoding="utf-8"), metadata={"source": file.name})
        for file in sorted(DOCUMENTS.glob("*.txt"))
    ]


def keep_up_to_date(
    documents: list[Document], manager: InMemoryRecordManager, store: SamKVChroma
) -> None:
    """LangChain's indexing API: adds new texts, deletes texts that changed or are gone."""
    index(
        documents,
        manager,
        store,
        cleanup="full",
        source_id_key="source",
        key_encoder="sha256",
    )


if __name__ == "__main__":
    main()

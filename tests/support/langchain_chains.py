"""LangChain's chains, by name.

Everything is LangChain as one would write it; nothing in a chain is ours but the model, and where
its name says so the compressor.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import Callbacks
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from benchmarks.datasets import Question
from langchain_samkv import (
    ChatSamKV,
    OfflineEmbeddings,
    SamKV,
    SamKVDocumentCompressor,
    format_docs,
)
from samkv_integrations import Engine
from samkv_integrations.lab.evaluation import f1_words
from samkv_integrations.store.chunk import normalise
from tests.support.pipelines import (
    TOP_K,
    TURNS,
    Ask,
    Asked,
    title_of,
)
from tests.support.records import builtin

MAX_TOKENS = 16

TEMPLATE = "Documents:\n\n{context}\n\nQuestion: {question}"
"""What the built-in model was trained on."""
IN_SYSTEM = "Use the following pieces of retrieved context to answer the question.\n\n{context}"


class Library:
    """The documents of the questions, cached, and in a vector store of LangChain's own."""

    def __init__(self, asked: Sequence[Question]) -> None:
        self.questions = tuple(asked)
        self.engine = Engine(builtin())
        bodies = [body for question in asked for body in question.documents]
        self.engine.cache_chunks(bodies)
        self.store = InMemoryVectorStore(OfflineEmbeddings())
        self.store.add_documents(
            [
                Document(body, id=title_of(body), metadata={"title": title_of(body)})
                for body in bodies
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a chain is built with."""

    library: Library
    method: str

    def chat(self, **options: Any) -> ChatSamKV:
        return ChatSamKV(
            engine=self.library.engine, method=self.method, max_tokens=MAX_TOKENS, **options
        )

    def llm(self) -> SamKV:
        return SamKV(engine=self.library.engine, method=self.method, max_tokens=MAX_TOKENS)

    def retriever(self, top_k: int = TOP_K) -> BaseRetriever:
        return self.library.store.as_retriever(search_kwargs={"k": top_k})

    def asked(self, question: str, answer: str, *shown: object) -> Asked:
        """An answer from what the retriever finds for this question."""
        return asked(answer, self.retriever().invoke(question), *shown)


def asked(answer: str, documents: Sequence[Document], *shown: object) -> Asked:
    bodies = tuple(normalise(document.page_content) for document in documents)
    return Asked(
        answer=answer,
        retrieved=bodies,
        shown=(*map(repr, documents), *map(str, shown)),
    )


def join(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


Make = Callable[[Setting], Ask]


def lcel(setting: Setting, prompt: Runnable[Any, Any], llm: Runnable[Any, Any]) -> Runnable:
    inputs = {"context": setting.retriever() | join, "question": RunnablePassthrough()}
    return inputs | prompt | llm | StrOutputParser()


def _user(template: str = TEMPLATE, template_format: Any = "f-string") -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages([("human", template)], template_format=template_format)


def _called(call: Callable[[Runnable, str], str]) -> Make:
    """The tutorial's chain, called in one of the ways there are to call a chain."""

    def make(setting: Setting) -> Ask:
        chain = lcel(setting, _user(), setting.chat())
        return lambda question: setting.asked(question, call(chain, question))

    return make


def _streamed(chain: Runnable, question: str) -> str:
    return "".join(chain.stream(question))


def _from_events(chain: Runnable, question: str) -> str:
    """What the model says, as a program hears it that watches events."""

    async def consume() -> str:
        return "".join(
            [
                event["data"]["chunk"].content
                async for event in chain.astream_events(question, version="v2")
                if event["event"] == "on_chat_model_stream"
            ]
        )

    return asyncio.run(consume())


CALLS: Mapping[str, Callable[[Runnable, str], str]] = {
    "invoke": lambda chain, question: chain.invoke(question),
    "stream": _streamed,
    "astream_events": _from_events,
}


def _string_llm(setting: Setting) -> Ask:
    prompt = PromptTemplate.from_template(f"{TEMPLATE}\nAnswer:")
    chain = lcel(setting, prompt, setting.llm())
    return lambda question: setting.asked(question, "".join(chain.stream(question)))


def _by_handles(setting: Setting) -> Ask:
    """The tutorial's chain, with the compressor and handles asked for."""
    compressor = SamKVDocumentCompressor(engine=setting.library.engine, mode="metadata")
    context = setting.retriever() | compressor.compress_documents
    inputs = {
        "context": context | partial(format_docs, handles=True),
        "question": RunnablePassthrough(),
    }
    chain = inputs | _user() | setting.chat() | StrOutputParser()
    # what is retrieved afterwards would show a compressor that changed the store's own documents
    return lambda question: setting.asked(question, chain.invoke(question))


def _replaced(setting: Setting) -> Ask:
    """A chain that takes ``page_content``, whatever it is; its sources are what it took."""
    retriever = ContextualCompressionRetriever(
        base_retriever=setting.retriever(),
        base_compressor=SamKVDocumentCompressor(engine=setting.library.engine, mode="replace"),
    )
    stuff = create_stuff_documents_chain(
        setting.chat(), _user(TEMPLATE.replace("{question}", "{input}"))
    )
    chain = create_retrieval_chain(retriever, stuff)

    def ask(question: str) -> Asked:
        found = chain.invoke({"input": question})
        texts = [Document(each.metadata["samkv_text"]) for each in found["context"]]
        return asked(found["answer"], texts, found)

    return ask


def _in_system(setting: Setting) -> Ask:
    prompt = ChatPromptTemplate.from_messages([("system", IN_SYSTEM), ("human", "{question}")])
    chain = lcel(setting, prompt, setting.chat())
    return lambda question: setting.asked(question, chain.invoke(question))


def _retrieval_chain(setting: Setting) -> Ask:
    prompt = ChatPromptTemplate.from_messages([("system", IN_SYSTEM), ("human", "{input}")])
    stuff = create_stuff_documents_chain(setting.chat(), prompt)
    chain = create_retrieval_chain(setting.retriever(), stuff)

    def ask(question: str) -> Asked:
        found = chain.invoke({"input": question})
        return asked(found["answer"], found["context"], found)

    return ask


def _retrieval_qa(setting: Setting) -> Ask:
    chain = RetrievalQA.from_chain_type(
        setting.chat(), retriever=setting.retriever(), return_source_documents=True
    )

    def ask(question: str) -> Asked:
        found = chain.invoke({"query": question})
        return asked(found["result"], found["source_documents"], found)

    return ask


class _SharedWords(BaseDocumentCompressor):
    """A reranker: by the share of the question's words that a document holds."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> Sequence[Document]:
        wanted = set(f1_words(query))
        shares = {d.id: len(wanted & set(f1_words(d.page_content))) for d in documents}
        return sorted(documents, key=lambda document: -shares[document.id])[:TOP_K]


def _compressed(setting: Setting) -> Ask:
    retriever = ContextualCompressionRetriever(
        base_retriever=setting.retriever(3 * TOP_K), base_compressor=_SharedWords()
    )
    stuff = create_stuff_documents_chain(
        setting.chat(), _user(TEMPLATE.replace("{question}", "{input}"))
    )
    chain = create_retrieval_chain(retriever, stuff)

    def ask(question: str) -> Asked:
        found = chain.invoke({"input": question})
        return asked(found["answer"], found["context"], found)

    return ask


class _Chats:
    """Chats of `TURNS` questions each: a question is a follow-up of those before it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._n_asked = 0
        self.sessions: dict[str, InMemoryChatMessageHistory] = {}
        prompt = ChatPromptTemplate.from_messages(
            [("system", IN_SYSTEM), MessagesPlaceholder("history"), ("human", "{question}")]
        )
        context = (lambda given: given["question"]) | setting.retriever() | join
        self._chain = RunnableWithMessageHistory(
            RunnablePassthrough.assign(context=context) | prompt | setting.chat(),
            lambda session_id: self.sessions.setdefault(session_id, InMemoryChatMessageHistory()),
            input_messages_key="question",
            history_messages_key="history",
        )

    def __call__(self, question: str) -> Asked:
        session_id, turn = (str(part) for part in divmod(self._n_asked, TURNS))
        self._n_asked += 1
        config: Any = {"configurable": {"session_id": session_id}}
        given = {"question": question}
        answer = self._chain.invoke(given, config).content
        memory = self.sessions[session_id].messages
        assert len(memory) == 2 * (int(turn) + 1)
        assert memory[-1].content == answer
        return self._setting.asked(question, answer, *memory)


def _checkpointed(setting: Setting) -> Ask:
    """Chats of `TURNS` questions, remembered by LangGraph."""
    llm, retriever, count = setting.chat(), setting.retriever(), itertools.count()

    def answer(state: MessagesState) -> dict[str, Any]:
        context = join(retriever.invoke(state["messages"][-1].content))
        told = [("system", IN_SYSTEM.format(context=context)), *state["messages"]]
        return {"messages": [llm.invoke(told)]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    app = graph.compile(checkpointer=InMemorySaver())

    def ask(question: str) -> Asked:
        config: Any = {"configurable": {"thread_id": str(next(count) // TURNS)}}
        *before, last = app.invoke({"messages": [("human", question)]}, config)["messages"]
        return setting.asked(question, last.content, *before, last)

    return ask


CHAINS: Mapping[str, Make] = {
    **{f"LCEL, {name}": _called(call) for name, call in CALLS.items()},
    "LCEL, context in the system message": _in_system,
    "LCEL, SamKV, stream": _string_llm,
    "LCEL, compressor": _by_handles,
    "create_retrieval_chain": _retrieval_chain,
    "create_retrieval_chain, compressor": _replaced,  # whoever sees sources sees handles
    "RetrievalQA": _retrieval_qa,
    "ContextualCompressionRetriever": _compressed,
    "RunnableWithMessageHistory": _Chats,
    "LangGraph, checkpointed": _checkpointed,
}

"""LangChain's chains as data: each asked the same questions, and compared with full prefill.

Everything is LangChain as one would write it; nothing in a chain is ours but the model, and where a
row says so the compressor.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import Callbacks
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough
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
from langchain_samkv.documents import Mode
from samkv_integrations import Engine
from samkv_integrations.cache.chunk import normalise
from tests.support import pipelines
from tests.support.pipelines import TOP_K, TURNS, Ask, Asked, Outcome, Row, title_of

MAX_TOKENS = 16

TEMPLATE = "Documents:\n\n{context}\n\nQuestion: {question}"
"""What the built-in model was trained on."""
IN_SYSTEM = "Use the following pieces of retrieved context to answer the question.\n\n{context}"


class Library(pipelines.Answering):
    """The documents of the questions, cached, and in a vector store of LangChain's own."""

    def __init__(self, asked: Sequence[Question]) -> None:
        super().__init__(asked)
        self.engine = Engine(pipelines.model())
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


# -- chains ----------------------------------------------------------------------------------

Make = Callable[[Setting], Ask]


def lcel(setting: Setting, prompt: Runnable[Any, Any], llm: Runnable[Any, Any]) -> Runnable:
    """The chain of every tutorial."""
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


def _astreamed(chain: Runnable, question: str) -> str:
    async def consume() -> str:
        return "".join([piece async for piece in chain.astream(question)])

    return asyncio.run(consume())


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


def _twice(answers: Sequence[str]) -> str:
    assert len(set(answers)) == 1, answers
    return answers[0]


CALLS: Mapping[str, Callable[[Runnable, str], str]] = {
    "invoke": lambda chain, question: chain.invoke(question),
    "ainvoke": lambda chain, question: asyncio.run(chain.ainvoke(question)),
    "stream": _streamed,
    "astream": _astreamed,
    "astream_events": _from_events,
    "batch": lambda chain, question: _twice(chain.batch([question] * 2)),
    "abatch": lambda chain, question: _twice(asyncio.run(chain.abatch([question] * 2))),
}


def _template(template_format: str, template: str) -> Make:
    def make(setting: Setting) -> Ask:
        chain = lcel(setting, _user(template, template_format), setting.chat())
        return lambda question: setting.asked(question, chain.invoke(question))

    return make


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


def _with_sources(setting: Setting) -> Ask:
    answer = (
        RunnablePassthrough.assign(context=lambda found: join(found["context"]))
        | _user()
        | setting.chat()
        | StrOutputParser()
    )
    chain = RunnableParallel(context=setting.retriever(), question=RunnablePassthrough()).assign(
        answer=answer
    )

    def ask(question: str) -> Asked:
        found = chain.invoke(question)
        return asked(found["answer"], found["context"], found)

    return ask


def _fallbacks(setting: Setting) -> Ask:
    other = FakeListChatModel(responses=["the other model"])
    chain = lcel(setting, _user(), setting.chat().with_fallbacks([other]))
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
    """With LangChain's own prompt."""
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
        shares = {d.id: pipelines.shared_words(query, d.page_content) for d in documents}
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

    def __init__(self, setting: Setting, *, streaming: bool) -> None:
        self._setting = setting
        self._streaming = streaming
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
        if self._streaming:
            answer = "".join(chunk.content for chunk in self._chain.stream(given, config))
        else:
            answer = self._chain.invoke(given, config).content
        memory = self.sessions[session_id].messages
        assert len(memory) == 2 * (int(turn) + 1)
        assert memory[-1].content == answer
        return self._setting.asked(question, answer, *memory)


class _State(TypedDict):
    question: str
    documents: list[Document]
    answer: str


def _graph(setting: Setting) -> Ask:
    llm, retriever = setting.chat(), setting.retriever()

    def retrieve(state: _State) -> dict[str, Any]:
        return {"documents": retriever.invoke(state["question"])}

    def answer(state: _State) -> dict[str, Any]:
        prompt = TEMPLATE.format(context=join(state["documents"]), question=state["question"])
        return {"answer": llm.invoke([HumanMessage(prompt)]).content}

    graph = StateGraph(_State)
    graph.add_node("retrieve", retrieve)
    graph.add_node("answer", answer)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "answer")
    graph.add_edge("answer", END)
    app = graph.compile()

    def ask(question: str) -> Asked:
        found = app.invoke({"question": question})
        return asked(found["answer"], found["documents"], found)

    return ask


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


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One row of the table.

    like: the chain whose full prefill it is compared with, because what it answers must be the
    same; itself if empty.
    way: how prompts hold documents; the compressor's mode.
    shows_handles: whether those who see sources see handles, as that mode has it.
    """

    make: Make
    like: str = ""
    way: Mode = "text"
    shows_handles: bool = False

    @property
    def aspects(self) -> tuple[str, ...]:
        """What is asked of it; where nothing makes handles, there are none to look for."""
        return tuple(each for each in pipelines.ASPECTS if each != "handles" or self.way != "text")


_FIRST = "LCEL, f-string, invoke"

CHAINS: Mapping[str, Chain] = {
    **{
        f"LCEL, f-string, {name}": Chain(
            make=_called(call), like="" if name == "invoke" else _FIRST
        )
        for name, call in CALLS.items()
    },
    "LCEL, mustache {{{ }}}": Chain(
        make=_template("mustache", TEMPLATE.replace("{", "{{{").replace("}", "}}}")), like=_FIRST
    ),
    # these documents hold nothing that HTML escapes
    "LCEL, mustache {{ }}": Chain(
        make=_template("mustache", TEMPLATE.replace("{", "{{").replace("}", "}}")), like=_FIRST
    ),
    "LCEL, jinja2": Chain(
        make=_template("jinja2", TEMPLATE.replace("{", "{{").replace("}", "}}")), like=_FIRST
    ),
    "LCEL, context in the system message": Chain(make=_in_system),
    "LCEL, SamKV, stream": Chain(make=_string_llm),
    "LCEL with sources": Chain(make=_with_sources, like=_FIRST),
    "with_fallbacks": Chain(make=_fallbacks, like=_FIRST),
    "create_retrieval_chain": Chain(
        make=_retrieval_chain, like="LCEL, context in the system message"
    ),
    "RetrievalQA": Chain(make=_retrieval_qa),
    "ContextualCompressionRetriever": Chain(make=_compressed),
    "RunnableWithMessageHistory": Chain(make=lambda setting: _Chats(setting, streaming=False)),
    "RunnableWithMessageHistory, stream": Chain(
        make=lambda setting: _Chats(setting, streaming=True), like="RunnableWithMessageHistory"
    ),
    "LCEL, compressor": Chain(make=_by_handles, like=_FIRST, way="metadata"),
    "create_retrieval_chain, compressor": Chain(
        make=_replaced, like=_FIRST, way="replace", shows_handles=True
    ),
    "LangGraph": Chain(make=_graph, like=_FIRST),
    "LangGraph, checkpointed": Chain(make=_checkpointed, like="RunnableWithMessageHistory"),
}


# -- measuring -------------------------------------------------------------------------------


def answers(name: str, library: Library, method: str) -> list[Outcome]:
    """What a chain answers to all questions of the library; asked once."""
    setting = Setting(library=library, method=method)
    return library.answers(f"{name} / {method}", lambda: CHAINS[name].make(setting))


def measure(name: str, library: Library) -> Row:
    """One row: the default method, compared with full prefill."""
    full = answers(CHAINS[name].like or name, library, method="recompute")
    found = answers(name, library, method="samkv-guided")
    return pipelines.compared(name, CHAINS[name].way, library.questions, found, full)

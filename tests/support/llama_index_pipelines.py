"""LlamaIndex's pipelines as data: each asked the same questions, and compared with full prefill.

Everything is LlamaIndex as one would write it, with its own prompts. Where the built-in model is
too small for a part (choosing a tool, splitting a question), that part is scripted and says so.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.react.types import ObservationReasoningStep
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms.mock import MockLLM
from llama_index.core.memory import Memory
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    NodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.vector_stores.chroma import ChromaVectorStore

from benchmarks.datasets import Question
from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.llms.samkv.quickstart import OfflineEmbedding
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.chroma.client import open_collection
from tests.support import pipelines
from tests.support.pipelines import TOP_K, TURNS, Ask, Asked, Outcome, Row, title_of

MAX_NEW_TOKENS = 32
"""Room for a question that a chat engine has condensed; the answers are far shorter."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a pipeline is told of the caches.

    postprocessor: options of the postprocessor; None for a pipeline without one.
    llm: options of the LLM.
    """

    postprocessor: Mapping[str, Any] | None
    llm: Mapping[str, Any]


WAYS: Mapping[str, Way] = {
    "text": Way(postprocessor={}, llm={}),
    "handle": Way(postprocessor={"mode": "handle"}, llm={"match_text": False}),
    "plain": Way(postprocessor=None, llm={}),
}


# -- what is asked about ---------------------------------------------------------------------


class Library(pipelines.Answering):
    """The documents of the questions in one folder, indexed in as many ways as pipelines need.

    One store holds the caches of all indexes. Close it after use.
    """

    def __init__(self, folder: Path, asked: Sequence[Question]) -> None:
        super().__init__(asked)
        self.exits = ExitStack()
        # LlamaIndex makes a remote model wherever it was given none: none of that here
        self.exits.enter_context(mock.patch.object(Settings, "_llm", MockLLM()))
        self.folder = folder
        self.engine = Engine(pipelines.model(), ChunkStore(folder / "kv"))
        self.collections: dict[str, Any] = {}

    def close(self) -> None:
        self.exits.close()

    def documents(self) -> list[Document]:
        """Each with its path, which prompts show, as they do for files that LlamaIndex reads."""
        return [
            Document(
                text=body,
                doc_id=title_of(body),
                metadata={"file_path": f"records/{title_of(body).lower().replace(' ', '-')}.txt"},
                excluded_embed_metadata_keys=["file_path"],
            )
            for question in self.questions
            for body in question.documents
        ]

    def chroma(self, name: str) -> ChromaVectorStore:
        collection = open_collection(self.folder / "chroma", name, create=True)
        self.collections[name] = collection
        return ChromaVectorStore(chroma_collection=collection)

    def index(
        self, name: str, nodes: Sequence[BaseNode], docstore: SimpleDocumentStore | None = None
    ) -> VectorStoreIndex:
        """An index of ``nodes`` in a Chroma collection of that name."""
        storage = StorageContext.from_defaults(vector_store=self.chroma(name), docstore=docstore)
        return VectorStoreIndex(nodes, storage_context=storage, embed_model=OfflineEmbedding())

    def parsed(
        self,
        documents: Sequence[Document] | None = None,
        parser: NodeParser | None = None,
    ) -> list[BaseNode]:
        """Nodes of the documents, their texts cached."""
        documents = self.documents() if documents is None else documents
        nodes = (parser or SentenceSplitter(chunk_size=512)).get_nodes_from_documents(documents)
        return list(SamKVCacheTransform(engine=self.engine)(nodes))

    def records(self) -> VectorStoreIndex:
        """The index that pipelines use who need no other."""
        return self.once("records", lambda: self.index("records", self.parsed()))


# -- how it is asked -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a pipeline is built with. exits: what must be closed after the last question."""

    library: Library
    way: str
    method: str
    exits: ExitStack = field(default_factory=ExitStack)

    def llm(self, kind: type[SamKVLLM] = SamKVLLM, **options: Any) -> SamKVLLM:
        return kind(
            engine=self.library.engine,
            method=self.method,
            max_new_tokens=MAX_NEW_TOKENS,
            **WAYS[self.way].llm,
            **options,
        )

    def postprocessors(self, **options: Any) -> list[BaseNodePostprocessor]:
        """Ours, or none at all."""
        chosen = WAYS[self.way].postprocessor
        if chosen is None:
            return []
        return [SamKVPostprocessor(engine=self.library.engine, **chosen, **options)]

    def retriever(self, top_k: int = TOP_K) -> BaseRetriever:
        return self.library.records().as_retriever(similarity_top_k=top_k)


# -- ways of asking --------------------------------------------------------------------------


def _texts(nodes: Sequence[NodeWithScore]) -> tuple[str, ...]:
    return tuple(normalise(found.node.get_content(MetadataMode.NONE)) for found in nodes)


def _visible(nodes: Sequence[NodeWithScore]) -> tuple[str, ...]:
    """All that a user sees of sources, and all that a program may store of them."""
    return tuple(
        text
        for found in nodes
        for text in (found.get_content(), str(found), repr(found), found.model_dump_json())
    )


def _asked(answer: str, response: Any) -> Asked:
    nodes = response.source_nodes
    chunks = [found for found in nodes if not found.node.get_content().startswith("Sub question:")]
    return Asked(
        answer=answer,
        retrieved=tuple(re.sub(r"^Source \d+:\n", "", text) for text in _texts(chunks)),
        shown=(response.get_formatted_sources(length=10_000), *_visible(nodes)),
    )


def _of_query_engine(engine: Any, *, streaming: bool = False, use_async: bool = False) -> Ask:
    def ask(question: str) -> Asked:
        response = engine.query(question)
        return _asked("".join(response.response_gen) if streaming else str(response), response)

    async def aask(question: str) -> Asked:
        response = await engine.aquery(question)
        if not streaming:
            return _asked(str(response), response)
        return _asked("".join([piece async for piece in response.async_response_gen()]), response)

    return (lambda question: asyncio.run(aask(question))) if use_async else ask


class _Chats:
    """Chats of `TURNS` questions each: a question is a follow-up of those before it."""

    def __init__(self, start: Callable[[], Any], *, streaming: bool, runner: asyncio.Runner | None):
        self._start = start
        self._streaming = streaming
        self._runner = runner
        self._n_asked = 0
        self._chat: Any = None

    def __call__(self, question: str) -> Asked:
        if self._n_asked % TURNS == 0:
            self._chat = self._start()
        self._n_asked += 1
        if self._runner is None:
            answer, response = self._ask(question)
        else:
            answer, response = self._runner.run(self._aask(question))
        memory = [message.model_dump_json() for message in self._chat.chat_history]
        assert len(memory) == 2 * ((self._n_asked - 1) % TURNS + 1)
        return Asked(
            answer=answer,
            retrieved=_texts(response.source_nodes),
            shown=(
                *memory,
                *(str(source) for source in response.sources),
                *_visible(response.source_nodes),
            ),
        )

    def _ask(self, question: str) -> tuple[str, Any]:
        if not self._streaming:
            response = self._chat.chat(question)
            return str(response), response
        response = self._chat.stream_chat(question)
        return "".join(response.response_gen), response

    async def _aask(self, question: str) -> tuple[str, Any]:
        if not self._streaming:
            response = await self._chat.achat(question)
            return str(response), response
        response = await self._chat.astream_chat(question)
        return "".join([piece async for piece in response.async_response_gen()]), response


# -- pipelines -------------------------------------------------------------------------------

Make = Callable[[Setting], Ask]


def _query(mode: str = "compact", *, streaming: bool = False, use_async: bool = False) -> Make:
    def make(setting: Setting) -> Ask:
        engine = RetrieverQueryEngine.from_args(
            setting.retriever(),
            llm=setting.llm(),
            response_mode=mode,
            node_postprocessors=setting.postprocessors(),
            streaming=streaming,
            use_async=use_async,
        )
        return _of_query_engine(engine, streaming=streaming, use_async=use_async)

    return make


def _several_calls(mode: str, context_window: int) -> Make:
    """A window that is too small for what is retrieved, packed by the tokens that chunks have."""

    def make(setting: Setting) -> Ask:
        llm = setting.llm(context_window=context_window)
        synthesizer = get_response_synthesizer(
            llm=llm,
            response_mode=mode,
            prompt_helper=PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenizer_fn),
        )
        engine = RetrieverQueryEngine.from_args(
            setting.retriever(3 * TOP_K),
            llm=llm,
            response_synthesizer=synthesizer,
            node_postprocessors=setting.postprocessors(),
        )
        return _of_query_engine(engine)

    return make


def _many_chunks(number: int) -> Make:
    def make(setting: Setting) -> Ask:
        engine = RetrieverQueryEngine.from_args(
            setting.retriever(number),
            llm=setting.llm(),
            response_mode="compact",
            node_postprocessors=setting.postprocessors(),
        )
        return _of_query_engine(engine)

    return make


def _citation(setting: Setting) -> Ask:
    engine = CitationQueryEngine.from_args(
        setting.library.records(),
        llm=setting.llm(),
        retriever=setting.retriever(),
        node_postprocessors=setting.postprocessors(),
    )
    return _of_query_engine(engine)


def _chat(kind: Any, *, streaming: bool = False, use_async: bool = False) -> Make:
    def make(setting: Setting) -> Ask:
        llm = setting.llm()

        def start() -> Any:
            return kind.from_defaults(
                retriever=setting.retriever(),
                llm=llm,
                node_postprocessors=setting.postprocessors(),
            )

        runner = setting.exits.enter_context(asyncio.Runner()) if use_async else None
        return _Chats(start, streaming=streaming, runner=runner)

    return make


def _halves(setting: Setting, llm: SamKVLLM) -> list[QueryEngineTool]:
    """Two query engines as tools, each over half of the documents, described by their titles."""
    library = setting.library
    tools = []
    for half in (0, 1):
        documents = library.documents()[half::2]
        name = f"half-{half}"
        index = library.once(name, lambda n=name, d=documents: library.index(n, library.parsed(d)))
        engine = index.as_query_engine(
            llm=llm,
            similarity_top_k=TOP_K,
            node_postprocessors=setting.postprocessors(),
        )
        titles = ", ".join(document.doc_id for document in documents)
        tools.append(QueryEngineTool.from_defaults(engine, name=name, description=titles))
    return tools


def _router(setting: Setting) -> Ask:
    """The tool is chosen by the offline embedding; the model is too small to choose."""
    llm = setting.llm()
    engine = RouterQueryEngine.from_defaults(
        _halves(setting, llm),
        llm=llm,
        selector=EmbeddingSingleSelector.from_defaults(OfflineEmbedding()),
    )
    return _of_query_engine(engine)


class _ToolsThatKnow(BaseQuestionGenerator):
    """Asks the question itself, of every tool that has a document about what it names.

    The model is too small to split a question or to choose a tool.
    """

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...

    def generate(self, tools: Sequence[Any], query: QueryBundle) -> list[SubQuestion]:
        return [
            SubQuestion(sub_question=query.query_str, tool_name=tool.name)
            for tool in tools
            if any(title in query.query_str for title in tool.description.split(", "))
        ]

    async def agenerate(self, tools: Sequence[Any], query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)


def _sub_questions(setting: Setting) -> Ask:
    llm = setting.llm()
    engine = SubQuestionQueryEngine.from_defaults(
        _halves(setting, llm),
        llm=llm,
        question_gen=_ToolsThatKnow(),
        verbose=False,
        use_async=False,
    )
    return _of_query_engine(engine)


class _CallsToolFirst(SamKVLLM):
    """Its first reply, the tool call, is scripted; the model is too small to write one."""

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        last = messages[-1].content or ""
        if last.startswith(("Observation:", "Documents:")):
            return await super().achat(messages, **kwargs)
        content = (
            "Thought: The records will tell.\nAction: records\n"
            f"Action Input: {json.dumps({'input': last})}"
        )
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=content))


class _AsAQuestion(ReActChatFormatter):
    """Asks about what a tool found in a prompt that the built-in model can read."""

    def format(
        self,
        tools: Sequence[Any],
        chat_history: list[ChatMessage],
        current_reasoning: list[Any] | None = None,
    ) -> list[ChatMessage]:
        steps = current_reasoning or []
        found = [step.observation for step in steps if isinstance(step, ObservationReasoningStep)]
        if not found:
            return super().format(tools, chat_history, current_reasoning)
        content = f"Documents:\n\n{found[-1]}\n\nQuestion: {chat_history[-1].content}"
        return [ChatMessage(role=MessageRole.USER, content=content)]


def _react(*, formatter: type[ReActChatFormatter]) -> Make:
    return partial(_react_with, formatter=formatter)


def _react_with(setting: Setting, formatter: type[ReActChatFormatter]) -> Ask:
    llm = setting.llm(_CallsToolFirst)
    tool = RetrieverTool.from_defaults(
        setting.retriever(),
        node_postprocessors=setting.postprocessors(),
        name="records",
        description="Finds records about towns, people, companies and products.",
    )

    async def aask(question: str) -> Asked:
        agent = ReActAgent(tools=[tool], llm=llm, formatter=formatter(), streaming=False)
        memory = Memory.from_defaults()
        output = await agent.run(user_msg=question, memory=memory)
        (call,) = output.tool_calls
        nodes = call.tool_output.raw_output
        history = await memory.aget_all()
        return Asked(
            answer=str(output),
            retrieved=_texts(nodes),
            shown=(
                *(message.model_dump_json() for message in history),
                call.tool_output.content,
                *_visible(nodes),
            ),
        )

    return lambda question: asyncio.run(aask(question))


def _sentences(library: Library) -> VectorStoreIndex:
    """Sentences, each with its window, which alone goes into prompts and is worth caching."""
    nodes = SentenceWindowNodeParser.from_defaults().get_nodes_from_documents(library.documents())
    return library.index("sentences", nodes)


def _sentence_window(*, at_ingest: bool) -> Make:
    def make(setting: Setting) -> Ask:
        library = setting.library
        index = library.once("sentences", lambda: _sentences(library))
        if at_ingest:
            library.once("windows", lambda: library.engine.cache_chunks(_windows(library)))
        replace = MetadataReplacementPostProcessor("window")
        options = {} if at_ingest else {"on_miss": "compute"}
        engine = index.as_query_engine(
            llm=setting.llm(),
            similarity_top_k=TOP_K,
            node_postprocessors=[replace, *setting.postprocessors(**options)],
        )
        return _of_query_engine(engine)

    return make


def _windows(library: Library) -> list[str]:
    rows = library.collections["sentences"].get(include=["metadatas"])
    return [row["window"] for row in rows["metadatas"]]


def _auto_merging(setting: Setting) -> Ask:
    library = setting.library

    def make() -> tuple[VectorStoreIndex, StorageContext]:
        # a document is a parent of two or three leaves
        parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[256, 64], chunk_overlap=0)
        nodes = library.parsed(parser=parser)
        docstore = SimpleDocumentStore()
        docstore.add_documents(nodes)
        index = library.index("leaves", get_leaf_nodes(nodes), docstore)
        return index, index.storage_context

    index, storage = library.once("hierarchy", make)
    engine = RetrieverQueryEngine.from_args(
        AutoMergingRetriever(index.as_retriever(similarity_top_k=2 * TOP_K), storage),
        llm=setting.llm(),
        node_postprocessors=setting.postprocessors(),
    )
    return _of_query_engine(engine)


class _SharedWords(BaseNodePostprocessor):
    """A reranker: by the share of the question's words that a node holds."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        assert query_bundle is not None
        for found in nodes:
            text = found.node.get_content(MetadataMode.EMBED)
            found.score = pipelines.shared_words(query_bundle.query_str, text)
        return sorted(nodes, key=lambda found: -(found.score or 0))[:TOP_K]


def _reranked(setting: Setting) -> Ask:
    rerankers: list[BaseNodePostprocessor] = [
        SimilarityPostprocessor(similarity_cutoff=0.2),
        _SharedWords(),
        LongContextReorder(),
    ]
    engine = RetrieverQueryEngine.from_args(
        setting.retriever(3 * TOP_K),
        llm=setting.llm(),
        node_postprocessors=[*rerankers, *setting.postprocessors()],
    )
    return _of_query_engine(engine)


def _templates(setting: Setting) -> Ask:
    """Headers as users write them, with a field that prompts must not show."""
    library = setting.library

    def make() -> VectorStoreIndex:
        documents = library.documents()
        for place, document in enumerate(documents):
            document.metadata |= {"page_label": str(place), "owner": "nobody's business"}
            document.excluded_embed_metadata_keys = list(document.metadata)
            document.excluded_llm_metadata_keys = ["owner"]
            document.metadata_template = "{key} = {value}"
            document.metadata_separator = " | "
            document.text_template = "Record ({metadata_str}):\n{content}\nEnd of record."
        return library.index("templates", library.parsed(documents))

    engine = library.once("templates", make).as_query_engine(
        llm=setting.llm(), similarity_top_k=TOP_K, node_postprocessors=setting.postprocessors()
    )
    return _of_query_engine(engine)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One row of the table.

    like: the pipeline whose full prefill it is compared with; itself if empty. A stream, or an
    answer awaited, must be what is returned otherwise.
    ways: those that make sense for it.
    fails: aspect -> why it is known to miss the bar, in every way.
    fails_with_handles, fails_with_texts: the same, with prompts of one kind alone.
    """

    make: Make
    like: str = ""
    ways: tuple[str, ...] = tuple(WAYS)
    fails: Mapping[str, str] = field(default_factory=dict)
    fails_with_handles: Mapping[str, str] = field(default_factory=dict)
    fails_with_texts: Mapping[str, str] = field(default_factory=dict)

    def excuse(self, way: str, aspect: str) -> str | None:
        """Why it misses the bar, if that is known."""
        of_kind = self.fails_with_handles if way == "handle" else self.fails_with_texts
        return self.fails.get(aspect) or of_kind.get(aspect)


_RETURNED = ("", "async")
_STREAMED = ("streaming", "async streaming")


def _variants(
    name: str,
    make: Callable[..., Make],
    kinds: Sequence[str] = (*_RETURNED, *_STREAMED),
    fails: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Pipeline]:
    """A pipeline, returned and streamed, called and awaited."""
    return {
        f"{name}, {kind}" if kind else name: Pipeline(
            make=make(streaming="streaming" in kind, use_async="async" in kind),
            like=name if kind else "",
            fails=fails,
        )
        for kind in kinds
    }


def _chats(kind: Any) -> dict[str, Pipeline]:
    """Streamed chats are compared with each other: LlamaIndex strips what it remembers of them."""
    name, make = kind.__name__, partial(_chat, kind)
    streamed = f"{name}, streaming"
    return {
        **_variants(name, make, _RETURNED),
        streamed: Pipeline(make=make(streaming=True)),
        f"{name}, async streaming": Pipeline(
            make=make(streaming=True, use_async=True), like=streamed
        ),
    }


# Where a call holds no answer the built-in model makes one up, letter by letter among near equals,
# and anything that is not the same arithmetic makes up another: `reuse` does, with all rows kept.
# In calls that hold the document asked about the answers are the same.
_MADE_UP = {"same": "calls without the document asked about: the built-in model makes answers up"}
_WRONG = {"same": "where full prefill is wrong (14 of 50) the answers are made up; else they agree"}
_REMEMBERED = {"handles": "what the tool found is kept in the memory as it was found"}
_CUT = {"hits": "a chunk that does not fit whole is cut in two, and is computed as text"}

PIPELINES: Mapping[str, Pipeline] = {
    **_variants("compact", partial(_query, "compact")),
    **_variants("refine", partial(_query, "refine")),
    **_variants("tree_summarize", partial(_query, "tree_summarize")),
    **_variants("simple_summarize", partial(_query, "simple_summarize")),
    **_variants("accumulate", partial(_query, "accumulate"), _RETURNED),
    **_variants("compact_accumulate", partial(_query, "compact_accumulate"), _RETURNED),
    "context_only": Pipeline(
        make=_query("context_only"),
        ways=("text", "plain"),  # it returns to the user what would go into a prompt: handles
    ),
    "compact, 8 chunks": Pipeline(make=_many_chunks(8)),
    "compact, 12 chunks": Pipeline(make=_many_chunks(12), fails=_WRONG),
    "compact, several calls": Pipeline(
        make=_several_calls("compact", 1300), fails=_MADE_UP, fails_with_texts=_CUT
    ),
    "tree_summarize, several calls": Pipeline(
        make=_several_calls("tree_summarize", 800), fails=_MADE_UP, fails_with_texts=_CUT
    ),
    "compact_accumulate, several calls": Pipeline(
        make=_several_calls("compact_accumulate", 800), fails=_MADE_UP, fails_with_texts=_CUT
    ),
    "CitationQueryEngine": Pipeline(
        make=_citation,
        fails_with_handles={"hits": "it makes its own nodes of the texts, which hold no handle"},
    ),
    **_chats(ContextChatEngine),
    **_chats(CondensePlusContextChatEngine),
    "RouterQueryEngine": Pipeline(make=_router),
    "SubQuestionQueryEngine": Pipeline(make=_sub_questions),
    "ReActAgent with RetrieverTool": Pipeline(
        make=_react(formatter=_AsAQuestion), fails_with_handles=_REMEMBERED
    ),
    "ReActAgent with RetrieverTool, its own prompt": Pipeline(
        make=_react(formatter=ReActChatFormatter),
        fails={"same": "the built-in model never saw a prompt of an agent, and makes answers up"},
        fails_with_handles=_REMEMBERED,
    ),
    "sentence windows, cached when first read": Pipeline(
        make=_sentence_window(at_ingest=False), ways=("text", "handle")
    ),
    "sentence windows, cached at ingest": Pipeline(make=_sentence_window(at_ingest=True)),
    "AutoMergingRetriever": Pipeline(
        make=_auto_merging, fails={"hits": "leaves of fewer than 16 tokens are computed as text"}
    ),
    "rerankers before": Pipeline(make=_reranked),
    "metadata templates": Pipeline(make=_templates),
}


# -- measuring -------------------------------------------------------------------------------


def answers(name: str, library: Library, way: str, method: str) -> list[Outcome]:
    """What a pipeline answers to all questions of the library; asked once."""
    with ExitStack() as exits:
        setting = Setting(library=library, way=way, method=method, exits=exits)
        key = f"{name} / {way} / {method}"
        return library.answers(key, lambda: PIPELINES[name].make(setting))


def measure(name: str, library: Library, way: str) -> Row:
    """One row: the default method, compared with full prefill."""
    full = answers(PIPELINES[name].like or name, library, way, method="recompute")
    found = answers(name, library, way, method="samkv-guided")
    return pipelines.compared(name, way, library.questions, found, full)


def cases() -> Iterator[tuple[str, str]]:
    """Every pipeline in every way that makes sense for it.

    How an answer is handed over has nothing to do with how its chunks are found, so streams and
    answers awaited are asked in one way.
    """
    for way in WAYS:
        for name, pipeline in PIPELINES.items():
            if way in pipeline.ways and (way == "text" or not pipeline.like):
                yield name, way
